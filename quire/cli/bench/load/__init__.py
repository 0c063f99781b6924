"""A load generator: when requests leave, what they ask, how answers are timed, and what the times say."""

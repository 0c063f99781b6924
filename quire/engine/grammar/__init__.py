"""Structured output: grammars are compiled and matched outside the engine's process.

A grammar comes from an untrusted user, and neither compiling nor matching it is bounded in time or memory. So each
grammar has its own process (a *matcher*), which can be killed. The engine sends it the tokens as they are sampled, and
reads the masks for the next ones from shared memory. Matchers are forks of one process (the *fork server*), which loads
the library and the vocabulary once, when the first request needs them.
"""

"""Other APIs' conversations and answers, in terms of a chat and back."""

"""Structured output: grammars compiled and followed outside the engine's process, and their masks.

A grammar comes from a stranger, and neither compiling one nor following it has a bound on its time or memory. So each
lives in a process of its own (a *guide*), which can be killed. The engine's process tells it the tokens as they are
drawn and finds the masks for the next ones in memory they share. Guides are forks of one process (the *nursery*), in
which the library and the vocabulary are loaded once, when the first request needs them.
"""

"""Responses and conversations that the server keeps, for clients that refer to them later.

tree.py        items in a tree of nodes, in SQLite: shared beginnings are stored once; bounds and lifetimes
store.py       `ResponseStore`: responses and conversations in that tree
turns.py       a stored response as a turn of a session, so that a follow-up finds its KV
background.py  responses that are generated after their request was answered
"""

"""Conversations with environments: what is appended to a sequence token by token, when it ends, who answers."""

"""Compiled functions that give each row bits of its own, for the native engine and the actor; how they are compiled."""

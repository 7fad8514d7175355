"""Reward functions, one file each; calling your own, verl's or TRL's in worker processes under a time limit."""

"""GRPO, DAPO, RLOO and the others, one file each: advantages, weights of tokens, the loss of a microbatch."""

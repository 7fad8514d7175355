"""What is sampled, which replica samples which prompt, and how samples get to the ranks that train on them."""

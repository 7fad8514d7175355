"""Model families (llama, qwen2 ...), one table of parameters each; config.json; presets with random weights."""

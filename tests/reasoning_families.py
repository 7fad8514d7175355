"""Opening and closing tag of the reasoning of each model family, written as its models write them."""

HARMONY_FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
FAMILIES = {
    "think": ("<think>\n", "\n</think>\n\n"),
    "upper case": ("<THINK>", "</THINK>"),
    "thinking": ("<thinking>", "</thinking>"),
    "thought": ("<thought>", "</thought>"),
    "reasoning": ("<reasoning>", "</reasoning>"),
    "scratchpad": ("<scratchpad>", "</scratchpad>"),
    "Seed-OSS": ("<seed:think>", "</seed:think>"),
    "MiniMax": ("<mm:think>", "</mm:think>"),
    "Magistral": ("[THINK]", "[/THINK]"),
    "Kimi-VL": ("◁think▷", "◁/think▷"),
    "Sky-T1": ("<|begin_of_thought|>", "<|end_of_thought|>"),
    "Command A": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "Apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "MedGemma": ("<unused94>thought\n", "<unused95>"),
    "Gemma 4": ("<|channel>thought\n", "<channel|>"),
    "gpt-oss, analysis": ("<|channel|>analysis<|message|>", HARMONY_FINAL),
    "gpt-oss, commentary": ("<|channel|>commentary<|message|>", HARMONY_FINAL),
    "gpt-oss, without <|end|>": (
        "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>",
    ),
}  # fmt: skip
CLOSED_BY_ANY_TURN = [name for name in FAMILIES if name.startswith("gpt-oss")]
"""Families whose closing tag ends other things than reasoning too, so that it says nothing without an opening tag."""

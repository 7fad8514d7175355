"""What 1.3 tells NVIDIA of each start (`usage/__init__.py`), and how it is told not to."""

import os

from tests.engines.trtllm.signature import flavour

reported = []


def report_usage():
    if flavour() == "1.3" and os.environ.get("TRTLLM_NO_USAGE_STATS") != "1":
        reported.append("LLM_CLASS")

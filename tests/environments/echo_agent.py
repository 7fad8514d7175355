"""An agent that says back what it heard, over plain HTTP; its reward is the length of what it heard."""

import json
import sys

from tests.environments.agent import by_hand

if __name__ == "__main__":
    given = json.loads(sys.stdin.readline())
    messages = [{"role": "user", "content": given["row"]["prompt"]}]
    by_hand(messages)
    heard = messages[-1]["content"]
    messages.append({"role": "user", "content": heard[:3] or "+"})
    by_hand(messages)
    sys.stdout.write(json.dumps({"reward": len(heard)}))

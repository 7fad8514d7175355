"""An agent as a user would write it: it knows OpenAI's client, or HTTP, and nothing of mrl.

Its first argument says what it does.
"""

import contextlib
import json
import os
import sys
import urllib.request


def main(what):
    given = json.loads(sys.stdin.readline())
    prompt = given["row"]["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if what in ("count", "stream", "tools"):
        return with_client(what, given["seed"], messages, given["row"].get("turns", 3))
    if what == "hurries":
        with contextlib.suppress(TimeoutError):
            by_hand(messages, timeout_s=0.5)
        by_hand(messages)
        return float(len(messages[-1]["content"]))
    fields = {"temperature": 0.5} if what == "heats" else {}
    by_hand(messages, **fields)
    if what == "rewrites":
        messages[-1]["content"] = "something else"
        messages.append({"role": "user", "content": "and now?"})
        by_hand(messages)
    if what == "dies":
        raise RuntimeError("the agent's own mistake")
    return None


def with_client(what, seed, messages, num_turns):
    from openai import OpenAI

    client = OpenAI(max_retries=0)

    def ask(**fields):
        message = client.chat.completions.create(model="policy", messages=messages, **fields).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        return message

    if what == "count":
        for turn in range(num_turns):
            messages.append({"role": "user", "content": f"{turn}: {ask().content} {seed}"})
        return float(len(ask().content))
    if what == "stream":
        chunks = client.chat.completions.create(model="policy", messages=messages, stream=True)
        return float(len("".join(chunk.choices[0].delta.content or "" for chunk in chunks)))
    tool = {"type": "function", "function": {"name": "double", "parameters": {"type": "object"}}}
    (call,) = ask(tools=[tool]).tool_calls
    found = str(2 * json.loads(call.function.arguments)["x"])
    messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return float(ask(tools=[tool]).content == found)


def by_hand(messages, timeout_s=None, **fields):
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages, **fields}).encode(),
        {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            messages.append(json.load(answer)["choices"][0]["message"])
    except urllib.request.HTTPError as error:
        sys.exit(error.read().decode())


if __name__ == "__main__":
    sys.stdout.write(f"begins\n{json.dumps({'reward': main(sys.argv[1])})}\n")

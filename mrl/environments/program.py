"""Environment that runs an agent program, whose chat completions are answered by the policy.

For agents in any language that use an OpenAI client. One process runs per episode. It reads the endpoint from
OPENAI_BASE_URL and OPENAI_API_KEY, and one line of JSON, {"seed": ..., "row": {...}}, from standard input. Each chat
completion that it requests is a turn: the new messages are the observation, the policy's message is the response. The
episode ends when the program exits with status 0; a last line {"reward": 1.0} on standard output is the reward.

    import json, sys
    from openai import OpenAI

    row, client = json.loads(sys.stdin.readline())["row"], OpenAI()
    messages = [{"role": "user", "content": row["prompt"]}]
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    print(json.dumps({"reward": float(answer.strip() == row["answer"])}))

The policy is trained on the exact tokens that it sampled. Therefore conversations must be append-only: a request
contains the messages of the previous one, the response to it, and at least one new message.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from mrl.environments._endpoint import AgentEndpoint, EndpointRequest
from mrl.environments.base import Action, Environment, Message, Observation, Schema
from mrl.errors import UserError

MAX_QUOTED_CHARS = 600
"""Number of characters of a failed program's output that are quoted."""

LONGEST_LINE = 1 << 16
"""Size of the end of a program's output that is read, bytes."""

INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH")
"""Environment variables that a program inherits, in addition to the endpoint's."""


class Program(Environment):
    """Environment that runs an agent program for one episode."""

    network = True
    """Sockets are allowed, because programs connect to the endpoint."""

    def __init__(
        self,
        command: str | Sequence[str],
        tools: Sequence[Schema] = (),
        ignore: Sequence[str] = (),
        prompt_key: str = "prompt",
    ) -> None:
        """Stores the command; `reset` starts it.

        Args:
            command: Command line of the program, a text or a list of words.
            tools: Schemas of the tools that every request of the program offers.
            ignore: Fields of requests to ignore in favour of the run's config, such as temperature or max_tokens.
            prompt_key: Column of the row with the prompt that the first request begins with.
        """
        self._command = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
        if not self._command:
            raise UserError("environment 'program': command is empty, expected a program with its arguments.")
        self._tools, self._ignored, self._prompt_key = [dict(tool) for tool in tools], frozenset(ignore), prompt_key
        self._conversation: list[Message] = []
        self._request: EndpointRequest | None = None

    @property
    def tools(self) -> Sequence[Schema]:
        """JSON schemas of the tools, as given in the config; the agent program offers the same ones in its requests."""
        return self._tools

    def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Starts the program and waits for its first request."""
        self._folder = tempfile.TemporaryDirectory(prefix="mrl-agent-")
        self._endpoint = AgentEndpoint(self._ignored)
        variables = {name: os.environ[name] for name in INHERITED if name in os.environ}
        variables |= {"OPENAI_BASE_URL": self._endpoint.url, "OPENAI_API_KEY": self._endpoint.key, "NO_PROXY": "*"}
        output, errors = Path(self._folder.name, "stdout"), Path(self._folder.name, "stderr")
        with open(output, "wb") as out, open(errors, "wb") as err:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=out, stderr=err, env=variables
            )
        Thread(target=self._feed, args=(json.dumps({"seed": seed, "row": dict(row)}),), daemon=True).start()
        Thread(target=self._watch, daemon=True).start()
        prompt = row.get(self._prompt_key) or []
        self._conversation = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
        )
        return self._next(self._endpoint.requests.get(), may_be_empty=bool(self._conversation))

    def step(self, action: Action) -> Observation:
        """Responds to the program's request and waits for its next request or its end."""
        message: Message = {"role": "assistant", "content": action.content or action.text}
        if action.tool_calls and not action.errors:
            message["content"] = action.content
            message["tool_calls"] = [
                {
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in action.tool_calls
            ]
        self._conversation.append(message)
        if self._request is None:
            raise RuntimeError("step() was called without a pending request of the program")
        request = self._after(self._request, (message, "tool_calls" if "tool_calls" in message else "stop"))
        return self._next(request, may_be_empty=False)

    def close(self) -> None:
        """Kills the program and its descendants, and closes the endpoint."""
        try:
            process = psutil.Process(self._process.pid)
            for one in (*process.children(recursive=True), process):
                one.kill()
        except psutil.Error:
            pass  # it has ended
        self._process.wait()
        self._endpoint.close()
        self._folder.cleanup()

    def _feed(self, line: str) -> None:
        try:
            with self._process.stdin as pipe:  # type: ignore[union-attr]
                pipe.write(line.encode() + b"\n")
        except OSError:
            pass  # the program does not read its standard input

    def _watch(self) -> None:
        self._process.wait()
        self._endpoint.requests.put(None)

    def _after(self, request: EndpointRequest, answer: tuple[Message, str]) -> EndpointRequest | None:
        """Responds to a request and returns the next one; None if the program has ended.

        If the client disconnected before the response, for instance at a timeout, a repeated request gets the same
        response.
        """
        while True:
            request.answer.put(answer)
            is_delivered, later = request.delivered.get(), self._endpoint.requests.get()
            if is_delivered or later is None or later.body != request.body:
                return later
            request = later

    def _next(self, request: EndpointRequest | None, *, may_be_empty: bool) -> Observation:
        """Returns the observation of a request, or of the program's end."""
        self._request = request
        if request is None:
            return self._ended()
        try:
            new = self._new_messages(request, may_be_empty)
        except ValueError as error:
            self.close()
            raise ValueError(f"the program's request does not continue its conversation: {error}.") from error
        self._conversation += new
        return Observation(tuple(map(_observed, new)))

    def _new_messages(self, request: EndpointRequest, may_be_empty: bool) -> list[Message]:
        """Returns the messages of a request after those of the conversation so far.

        Raises:
            ValueError: The request changes earlier messages, adds none, or offers other tools.
        """
        messages, known = request.messages, self._conversation
        for place, one in enumerate(known):
            if place >= len(messages) or _compared(messages[place]) != _compared(one):
                found = json.dumps(_compared(messages[place]))[:200] if place < len(messages) else "nothing"
                raise ValueError(f"message {place} is {found}, expected {json.dumps(_compared(one))[:200]}")
        if len(messages) == len(known) and not may_be_empty:
            raise ValueError("it has no message after the policy's last one")
        if any(one.get("role") == "assistant" for one in messages[len(known) :]):
            raise ValueError("it has an assistant's message that the policy did not generate")
        offered = request.body.get("tools") or []
        if offered != self._tools:
            names = [tool.get("function", {}).get("name") for tool in offered if isinstance(tool, dict)]
            raise ValueError(f"it offers the tools {names}, which are not rollout.agent.environment_kwargs.tools")
        return messages[len(known) :]

    def _ended(self) -> Observation:
        output, errors = (Path(self._folder.name, name).read_bytes()[-LONGEST_LINE:] for name in ("stdout", "stderr"))
        if self._process.returncode:
            excerpt = (errors or output).decode(errors="replace").strip()[-MAX_QUOTED_CHARS:]
            raise RuntimeError(f"the program ended with status {self._process.returncode}: {excerpt}")
        lines = output.decode(errors="replace").strip().splitlines()
        return Observation(terminated=True, reward=_reward(lines[-1]) if lines else None)


def _compared(message: Message) -> tuple[Any, ...]:
    """Returns the compared part of a message: role, text and tool calls; ignores fields that clients add."""
    calls = message.get("tool_calls") or []
    return message.get("role"), str(message.get("content") or "").strip(), [_call(call) for call in calls]


def _call(call: Any) -> Any:
    try:
        function = call["function"]
        return [function["name"], json.loads(function["arguments"])]
    except (KeyError, TypeError, ValueError):
        return call


def _observed(message: Message) -> Message:
    """Returns the fields of a message that chat templates use."""
    kept = {name: message[name] for name in ("role", "content", "name") if message.get(name) is not None}
    return kept | ({"role": "system"} if kept["role"] == "developer" else {})


def _reward(line: str) -> float | None:
    """Parses the reward of a program's last line; None if it has none."""
    try:
        value = json.loads(line)["reward"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"the program's last line has the reward {str(value)[:50]}, expected a finite number")
    return float(value)


ENVIRONMENT = Program

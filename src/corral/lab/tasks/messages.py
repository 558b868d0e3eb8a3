"""Conversion of prompts and completions, each a text or a list of chat messages, to text."""

import json
from typing import Any

Message = dict[str, str]


def text_of(chat: Any) -> str:
    """Return the text of a prompt or a completion, which is a list of messages for chat models."""
    return chat if isinstance(chat, str) else "".join(map(_content, chat))


def answer_of(completion: Any) -> str:
    """Return the text of a completion to grade: the last message if the model wrote this message, else ""."""
    if isinstance(completion, str) or not completion:
        return completion or ""
    return _content(completion[-1]) if completion[-1].get("role") != "tool" else ""


def transcript(completion: Any) -> str:
    """Write a completion as readable text: the model's messages, `→ name({…})` for tool calls, and `← …` for tool results."""
    if isinstance(completion, str):
        return completion
    lines = []
    for message in completion:
        content, calls = _content(message), message.get("tool_calls") or []
        if message.get("role") == "tool":
            lines.append(f"← {content}")
            continue
        if content or not calls:
            lines.append(content)
        for function in (call.get("function", call) for call in calls):
            arguments = json.dumps(function.get("arguments", {}), ensure_ascii=False, default=str)
            lines.append(f"→ {function.get('name')}({arguments})")
    return "\n".join(lines)


def _content(message: dict[str, Any]) -> str:
    """Return the text of a message: all its text parts joined, or "" if the message only calls a tool."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)

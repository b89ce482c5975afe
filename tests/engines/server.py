"""What is asked of a server of vLLM."""

import json
import urllib.request
from typing import Any

from tests.engines.models import NEW_TOKENS, PROMPTS


def ask(url: str, path: str, body: Any = None) -> Any:
    """The JSON of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=100) as answer:
        return json.loads(answer.read() or b"null")


def generate(url: str) -> list[list[int]]:
    """Tokens for the prompts, one request each."""
    sampling = {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "detokenize": False}
    answers = [
        ask(url, "/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling, "stream": False})
        for prompt in PROMPTS
    ]
    return [answer["choices"][0]["token_ids"] for answer in answers]

"""A vLLM server's HTTP, as TRL's own client speaks it, in front of `FakeVLLM`; weights come by a function call instead of NCCL.

- `serving(model)`: inside, TRL believes that vLLM is installed, and the process that entered serves `model`.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

import trl.generation.vllm_client
import trl.generation.vllm_generation
from tiny_models import FakeVLLM
from torch import Tensor
from transformers import PreTrainedModel
from trl.generation.vllm_client import VLLMClient

INFO = {"model_config": {"logprobs_mode": "processed_logprobs"}, "weight_transfer_config": {"backend": "nccl"}}


class FakeServer(ThreadingHTTPServer):
    """Samples from a model of its own, with the weights that it was sent last."""

    daemon_threads = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = model
        self.requests: list[dict[str, Any]] = []
        self.weights: list[dict[str, Tensor]] = []
        """Of every synchronisation."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def receive(self, client: VLLMClient, metadata: list[Any], named: Iterator[tuple[str, Tensor]]) -> None:
        """In the place of the client's `update_named_params`."""
        found = {name: weight.detach().clone() for name, weight in named}
        assert [(name, list(weight.shape)) for name, weight in found.items()] == [(name, shape) for name, _, shape in metadata]
        self.model.load_state_dict(found, strict=False)
        self.weights.append(found)

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What /v1/completions answers: the n completions of a prompt, then those of the next."""
        self.requests.append(asked)
        sampler = FakeVLLM(
            model=self.model, temperature=asked["temperature"], max_completion_length=asked["max_tokens"],
            logprobs=asked["logprobs"],
        )  # fmt: skip
        prompts = [prompt for prompt in asked["prompt"] for _ in range(asked["n"])]
        sampler.generator.manual_seed(len(self.requests))
        choices = []
        for prompt, tokens, values, ids in zip(*sampler.generate(prompts=prompts), strict=True):
            ranked = [dict(zip(_names(row), logp, strict=True)) for row, logp in zip(ids, values, strict=True)]
            own = [some[name] for some, name in zip(ranked, _names(tokens), strict=True)]
            logprobs = {"tokens": _names(tokens), "token_logprobs": own, "top_logprobs": ranked}
            choices.append({"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": logprobs})
        return {"choices": choices}


def _names(tokens: list[int]) -> list[str]:
    return [f"token_id:{token}" for token in tokens]


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        answers = {"/health": {}, "/v1/models": {"data": [{"id": "tiny"}]}, "/server_info": {"vllm_config": INFO}}
        self._answer(answers[self.path.partition("?")[0]])

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        self._answer(self.server.complete(asked) if self.path == "/v1/completions" else {"success": True})

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def serving(model: PreTrainedModel) -> Iterator[FakeServer]:
    """Inside, `model` is served under the server's `url`."""
    server = FakeServer(model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with ExitStack() as stack:
        stack.callback(server.shutdown)
        for module in (trl.generation.vllm_client, trl.generation.vllm_generation):
            stack.enter_context(mock.patch.object(module, "is_vllm_available", return_value=True))
        stack.enter_context(mock.patch.object(VLLMClient, "init_communicator"))
        stack.enter_context(mock.patch.object(VLLMClient, "update_named_params", autospec=True, side_effect=server.receive))
        yield server

"""A cluster whose target has a chat template of the test's, and its clients."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from tokenizers import AddedToken

import outrider
from outrider.config import ClusterConfig, DrafterConfig, GatewayConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS


@dataclass(frozen=True)
class Clients:
    sdk: outrider.AsyncClient
    openai: openai.AsyncOpenAI


def make_target(folder: Path, template: str, added: Sequence[AddedToken] = ()) -> None:
    """The reference target with that template. `added`: see `with_added`."""
    _make_model("target", folder, added)
    (folder / "chat_template.jinja").write_text(template)


def _make_model(name: str, folder: Path, added: Sequence[AddedToken]) -> None:
    folder.mkdir()
    for file in (MODELS / name).iterdir():
        if added and file.name == "tokenizer.json":
            (folder / file.name).write_text(with_added(file.read_text(encoding="utf-8"), added), encoding="utf-8")
        else:
            (folder / file.name).symlink_to(file)


def with_added(tokenizer: str, added: Sequence[AddedToken]) -> str:
    """Return a tokenizer of the reference models in which added tokens are in the place of the last ones."""
    made = json.loads(tokenizer)
    vocabulary: dict[str, int] = made["model"]["vocab"]
    for token, (replaced, id_) in zip(added, sorted(vocabulary.items(), key=lambda entry: -entry[1]), strict=False):
        del vocabulary[replaced]
        vocabulary[token.content] = id_
        made["model"]["merges"] = [pair for pair in made["model"]["merges"] if "".join(pair) != replaced]
        flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        made["added_tokens"].append({"id": id_, "content": token.content, **flags})
    made["added_tokens"].sort(key=lambda token: token["id"])
    return json.dumps(made)


@asynccontextmanager
async def chat_clients(
    folder: Path, template: str, added: Sequence[AddedToken] = (), **router: Any
) -> AsyncIterator[Clients]:
    """`folder`: for the target, which is made here; `added`: see `with_added`; `router`: further keys of its
    configuration."""
    make_target(folder, template, added)
    drafter = folder.with_name("drafter")
    _make_model("drafter", drafter, added)
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": folder}, overlap=True, **router),
        verifier=[VerifierConfig(model=folder, dtype="float32")],
        drafter=[DrafterConfig(model=drafter, dtype="float32")],
        gateway=GatewayConfig(listen="127.0.0.1:0"),
    )
    async with (
        LocalCluster(config, forward=lambda name, line: print(name, line)) as cluster,
        outrider.AsyncClient(cluster.router_address) as sdk,
        openai.AsyncOpenAI(
            base_url=f"http://{cluster.processes['gateway'].address}/v1", api_key="unused", max_retries=0
        ) as theirs,
    ):
        yield Clients(sdk, theirs)

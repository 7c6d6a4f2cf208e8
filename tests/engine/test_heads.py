"""Heads draft what their networks predict for each path alone, whatever else is drafted; foreign ones are refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.core.session.digest import former_tokenizer_digest
from outrider.engine.checkpoints.checkpoint import read_config, read_json, read_tokenizer_digest
from outrider.engine.checkpoints.model_card import ModelCard, weights_digest, write_card
from outrider.engine.checkpoints.rope import Rope
from outrider.engine.gpu import DeviceEagleDrafts
from outrider.engine.heads.checkpoint_io import Network, _Placed, load_network, save_network
from outrider.engine.heads.config import KINDS, HeadsConfig, Kind, low_middle_high, make_heads_config
from outrider.engine.heads.eagle import Eagle, Eagle3, attend_causally
from outrider.engine.heads.eagle_drafts import CHUNK
from outrider.engine.heads.eagle_engine import EagleEngine
from outrider.engine.heads.embeddings import TargetEmbeddings, read_target_embeddings
from outrider.engine.heads.loading import MOST_PADDING, check_heads, load_speculator
from outrider.engine.heads.medusa import Medusa
from outrider.engine.heads.mlp import MlpSpeculator
from outrider.engine.heads.speculator import HeadNodes, HeadRoot, KeptFeatures, Speculator
from outrider.engine.torch_layers.weights import complex_rotations
from outrider.errors import CheckpointError, ConfigError
from tests.engine.families import make_family
from tests.engine.small_checkpoints import MODELS, make_checkpoint
from tests.engine.taught import random_heads, target_with_heads

TARGET = MODELS / "target"
CONTEXT = 256  # of the small target


def on_cpu(folder: Path, target: Path) -> Speculator:
    return load_speculator(folder, target, precise=True, slots=4, context=CONTEXT)


def on_device(folder: Path, target: Path) -> Speculator:
    speculator = target_with_heads(target, folder, slots=4).speculator
    assert speculator is not None
    return speculator


Loading = Callable[[Path, Path], Speculator]
BOTH = pytest.mark.parametrize(
    ("kind", "loading"),
    [(kind, on_cpu) for kind in KINDS] + [(kind, on_device) for kind in ("eagle", "eagle-3")],
)


class Case:
    """Heads of one kind on a small target: as they draft, and as their network computes it."""

    def __init__(
        self, kind: Kind, target: Path, folder: Path, *, own_head: bool = False, loading: Loading = on_cpu
    ) -> None:
        self.shape, self.network = random_heads(kind, target, folder, own_head=own_head)
        self.ends: TargetEmbeddings = read_target_embeddings(target, torch.float32)
        self.speculator: Speculator = loading(folder, target)
        self.random = np.random.default_rng(5)

    def open(self, slot: int, source: int | None, rows: int, text: tuple[list[int], Tensor]) -> None:
        """Begin a session over a text, of which the slot or another one has the first rows."""
        open_slot(self.speculator, slot, source, rows)
        add(self.speculator, slot, rows, text)

    def text(self, count: int) -> tuple[list[int], Tensor]:
        """Tokens, and features as if the target had computed them."""
        tokens = self.random.integers(0, self.shape.vocabulary, count).tolist()
        width = self.shape.width * self.shape.features.parts
        return tokens, torch.from_numpy(self.random.normal(size=(count, width)).astype(np.float32))

    def reference(self, tokens: Sequence[int], features: Tensor, path: Sequence[int]) -> Tensor:
        """The slow reference: after a text and a path of drafted tokens, from the beginning."""
        with torch.no_grad():
            return decoded(self.shape, self.network, self.ends, tokens, features, path)


def open_slot(speculator: Speculator, slot: int, source: int | None, rows: int) -> None:
    if isinstance(speculator, DeviceEagleDrafts):
        speculator.release(slot, rows if source is None else 0)
        if source is not None:
            speculator.copy(source, slot, rows)
    speculator.open_slot(slot, source, rows)


def add(
    speculator: Speculator, slot: int, start: int, text: tuple[Sequence[int], Tensor], stop: int | None = None
) -> None:
    """Add features of rows [start, stop), None: of all but the last."""
    tokens, features = text
    stop = len(tokens) - 1 if stop is None else stop
    speculator.add_features(features, [KeptFeatures(slot, start, range(start, stop), tokens[start : stop + 1])])


def decoded(
    shape: HeadsConfig,
    network: Network,
    ends: TargetEmbeddings,
    tokens: Sequence[int],
    features: Tensor,
    path: Sequence[int],
) -> Tensor:
    latest = features[len(tokens) - 2 : len(tokens) - 1]
    match network:
        case Medusa():
            return network(latest, ends.unembed)[0, len(path)]
        case MlpSpeculator():
            state = latest
            for level, token in enumerate([tokens[-1], *path]):
                state = network(level, state, ends.embed(torch.tensor([token])))
            return network.logits(state, ends.unembed)[0]
        case Eagle() | Eagle3():
            states, whole = network.enter(features[: len(tokens) - 1]), [*tokens[1:], *path]
            for count in range(len(tokens) - 1, len(whole) + 1):
                turns = complex_rotations(Rope(shape.theta, None), count, shape.head_dim)
                embedded = ends.embed(torch.tensor(whole[:count]))
                given = network(embedded, states[:count], turns, attend_causally)
                states = torch.cat([states, given[-1:]])
            return network.logits(given[-1:], ends.unembed)[0]


def draft_trees(case: Case, texts: dict[int, tuple[list[int], Tensor]], levels: int) -> None:
    """A round over all slots, in which every level expands nodes of the ones before; all as the reference."""
    rows, _ = case.speculator.begin([HeadRoot(slot, tokens) for slot, (tokens, _) in texts.items()])
    known: list[tuple[int, tuple[int, ...]]] = [(slot, ()) for slot in texts]
    for (slot, path), row in zip(known, rows, strict=True):
        assert row is not None
        check(case, texts[slot], path, row.logits)
    for level in range(levels):
        lately = [number for number, (_, path) in enumerate(known) if len(path) <= level]
        parents = case.random.choice(lately, 5).tolist()
        nodes = [HeadNodes(parent, int(case.random.integers(case.shape.vocabulary))) for parent in parents]
        new = [(known[node.parent][0], (*known[node.parent][1], node.token)) for node in nodes]
        for (slot, path), row in zip(new, case.speculator.expand(nodes), strict=True):
            check(case, texts[slot], path, row.logits)
        known += new


def check(case: Case, text: tuple[list[int], Tensor], path: Sequence[int], row: np.ndarray) -> None:
    expected = case.reference(*text, path).numpy()
    assert np.abs(row - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("own_head", [False, True])
@BOTH
def test_trees_of_several_sessions_are_drafted_as_one_path_at_a_time(
    kind: Kind, loading: Loading, own_head: bool, small: Path, tmp_path: Path
) -> None:
    case = Case(kind, small, tmp_path, own_head=own_head, loading=loading)
    texts = {slot: case.text(size) for slot, size in ((2, 17), (0, 40), (3, 2))}
    for slot, (tokens, features) in texts.items():
        case.open(slot, None, 0, (tokens, features))
    draft_trees(case, texts, levels=case.speculator.depth - 1)
    for slot, (tokens, features) in texts.items():  # commits, of which nothing that was drafted is left
        more, true = case.text(3)
        texts[slot] = [*tokens, *more], torch.cat([features, true])
        add(case.speculator, slot, len(tokens) - 1, texts[slot])
    draft_trees(case, texts, levels=case.speculator.depth - 1)


@pytest.mark.parametrize("loading", [on_cpu, on_device])
@pytest.mark.parametrize("kind", ["eagle", "eagle-3"])
def test_a_session_in_a_warm_slot_continues_from_its_rows(
    kind: Kind, loading: Loading, small: Path, tmp_path: Path
) -> None:
    """In the same slot, behind a part of it, and in another that was copied from: the rest is another text."""
    case = Case(kind, small, tmp_path, loading=loading)
    tokens, features = case.text(30)
    case.open(0, None, 0, (tokens, features))
    draft_trees(case, {0: (tokens, features)}, levels=2)
    for slot, source in ((1, 0), (0, None)):
        other, true = case.text(9)
        text = [*tokens[:20], *other], torch.cat([features[:20], true])
        case.open(slot, source, 20, text)
        draft_trees(case, {slot: text}, levels=2)


def test_a_long_text_is_read_in_chunks_beside_other_texts(tmp_path: Path) -> None:
    """Also where the session did not draft while the text was generated."""
    shape, network = random_heads("eagle", TARGET, tmp_path)
    ends = read_target_embeddings(TARGET, torch.float32)
    speculator = load_speculator(tmp_path, TARGET, precise=True, slots=2, context=2 * CHUNK)
    random = np.random.default_rng(1)
    texts = [random.integers(0, 4096, size).tolist() for size in (CHUNK + 20, 9)]
    features = [torch.from_numpy(random.normal(size=(len(text), 256)).astype(np.float32)) for text in texts]
    for slot in (0, 1):
        open_slot(speculator, slot, None, 0)
        add(speculator, slot, 0, (texts[slot], features[slot]))
    roots = [HeadRoot(slot, text) for slot, text in enumerate(texts)]
    (first, second), _ = speculator.begin(roots)
    assert first is None
    assert second is not None
    kept = second.logits
    (first, again), _ = speculator.begin(roots)
    assert first is not None
    assert again is not None
    assert np.allclose(kept, again.logits, atol=1e-4)
    with torch.no_grad():
        expected = decoded(shape, network, ends, texts[0], features[0], ()).numpy()
    assert np.abs(first.logits - expected).max() < 1e-3
    for start in range(0, CHUNK + 19, 100):  # the target reads the text again, which the heads need not do
        add(speculator, 0, start, (texts[0], features[0]), min(start + 100, CHUNK + 19))
    (first, _), _ = speculator.begin(roots)
    assert first is not None
    assert np.abs(first.logits - expected).max() < 1e-3


def test_heads_never_draft_padding(small: Path, tmp_path: Path) -> None:
    target = tmp_path / "padded"
    make_checkpoint(target)
    raw = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(raw | {"outrider_unpadded_vocabulary": 100}), encoding="utf-8")
    for kind in KINDS:
        case = Case(kind, target, tmp_path / kind)  # type: ignore[arg-type]
        tokens, features = case.text(5)
        case.open(0, None, 0, (tokens, features))
        (row,), _ = case.speculator.begin([HeadRoot(0, tokens)])
        assert row is not None
        assert np.isneginf(row.logits[100:]).all()
        assert np.isneginf(case.speculator.expand([HeadNodes(0, 3)])[0].logits[100:]).all()
        assert np.isfinite(row.logits[:100]).all()


@pytest.mark.parametrize("rows", [4090, 4352])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_with_another_padding_draft_only_ids_that_both_models_have(kind: Kind, rows: int, tmp_path: Path) -> None:
    """The tokenizer has 4,090 ids, the target 4,096."""
    target = short_tokenizer(tmp_path / "target", 4090)
    shape, _ = random_heads(kind, target, tmp_path / "heads", own_head=True)
    texts = {}
    for folder in (tmp_path / "heads", repadded(tmp_path / "heads", tmp_path / "padded", rows)):
        speculator = load_speculator(folder, target, precise=True, slots=1, context=CONTEXT)
        tokens, features = [1, 2, 3], torch.ones(3, shape.width * shape.features.parts)
        open_slot(speculator, 0, None, 0)
        add(speculator, 0, 0, (tokens, features))
        (root,), _ = speculator.begin([HeadRoot(0, tokens)])
        nodes = speculator.expand([HeadNodes(0, 5), HeadNodes(0, 4000)])
        texts[folder] = np.stack([root.logits, *(node.logits for node in nodes)])  # type: ignore[union-attr]
    own, padded = texts.values()
    both = min(rows, 4096)
    assert padded.shape == own.shape == (3, 4096)
    assert np.allclose(padded[:, :both], own[:, :both], atol=1e-4)
    assert np.isneginf(padded[:, both:]).all()
    assert speculator.unpadded_vocabulary == both
    if kind in ("eagle", "eagle-3"):
        engine = EagleEngine.load(tmp_path / "padded", target, precise=True, slots=1, threads=1)
        assert (engine.vocabulary, engine.unpadded_vocabulary) == (4096, both)


def test_heads_that_lack_ids_of_the_tokenizer_are_refused(tmp_path: Path) -> None:
    target = short_tokenizer(tmp_path / "target", 4090)
    random_heads("medusa", target, tmp_path / "heads", own_head=True)
    for rows in (4089, 4096 + MOST_PADDING + 1):
        with pytest.raises(ConfigError, match=f"a target whose vocabulary is {rows}"):
            check_heads(repadded(tmp_path / "heads", tmp_path / str(rows), rows), target)


def short_tokenizer(folder: Path, ids: int) -> Path:
    """The reference target, its tokenizer cut to its first ids."""
    shutil.copytree(TARGET, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    model["vocab"] = {word: id_ for word, id_ in model["vocab"].items() if id_ < ids}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    path.unlink()
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def repadded(source: Path, folder: Path, rows: int) -> Path:
    """Heads whose own unembedding has `rows` rows; further ones are louder than all others."""
    shape, network = load_network(source)
    for child in network.modules():
        if isinstance(child, torch.nn.Linear) and child.out_features == shape.vocabulary:
            table = child.weight.data[:rows]
            child.weight.data = torch.cat([table, 50.0 * table[: max(0, rows - len(table))]])
    save_network(folder, replace(shape, vocabulary=rows), network, torch.float32)
    return folder


def test_medusa_begins_as_the_target_s_own_head_and_its_file_is_small(tmp_path: Path) -> None:
    shape = make_heads_config("medusa", read_config(TARGET), depth=3)
    network, ends = Medusa(shape), read_target_embeddings(TARGET, torch.float32)
    features = torch.randn(2, 256)
    assert torch.allclose(network(features, ends.unembed), ends.unembed(features)[:, None].expand(-1, 3, -1), atol=1e-5)
    save_network(tmp_path, shape, network)
    assert (tmp_path / "model.safetensors").stat().st_size < 3 * 256 * 257 * 2 + 1000
    again, loaded = load_network(tmp_path)
    assert again == shape
    assert isinstance(loaded, Medusa)


def test_heads_load_without_transformers(tmp_path: Path) -> None:
    random_heads("eagle-3", TARGET, tmp_path)
    script = (
        "import sys; from pathlib import Path; from outrider.engine.heads.loading import load_speculator as load; "
        f"load(Path({str(tmp_path)!r}), Path({str(TARGET)!r}), precise=False, slots=1, context=64); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


def test_heads_of_another_target_are_refused(small: Path, tmp_path: Path) -> None:
    shape, network = random_heads("medusa", TARGET, tmp_path)
    with pytest.raises(ConfigError, match=r"a target whose width is 256, and that of .* is 64"):
        check_heads(tmp_path, small)
    save_network(tmp_path, replace(shape, vocabulary=77), network)
    with pytest.raises(ConfigError, match="a target whose vocabulary is 77"):
        check_heads(tmp_path, TARGET)
    save_network(tmp_path, replace(shape, kind="eagle-3", layers=(1, 2, 9)), network)
    with pytest.raises(CheckpointError, match="inner is 0, must be there"):
        check_heads(tmp_path, TARGET)
    save_network(tmp_path, shape, network)
    with pytest.raises(ConfigError, match="runs through transformers"):
        check_heads(tmp_path, make_family(tmp_path / "gpt2", "gpt2"))
    card = ModelCard("medusa", "other", "0" * 32, read_tokenizer_digest(TARGET).hex(), "text", 1, 1.0)
    write_card(tmp_path, card)
    with pytest.raises(ConfigError, match=r"heads: .* was made for other, whose weights are others"):
        check_heads(tmp_path, TARGET)
    former = former_tokenizer_digest(read_json(TARGET / "tokenizer.json")).hex()
    write_card(tmp_path, replace(card, target_digest=weights_digest(TARGET), tokenizer_digest=former))
    check_heads(tmp_path, TARGET)
    write_card(tmp_path, replace(card, target_digest=weights_digest(TARGET), tokenizer_digest="00"))
    with pytest.raises(ConfigError, match="whose tokenizer is another"):
        check_heads(tmp_path, TARGET)
    write_card(tmp_path, replace(card, target_digest=weights_digest(TARGET)))
    check_heads(tmp_path, TARGET)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"outrider_speculator": "hydra"}, "outrider_speculator is 'hydra', must be one of medusa"),
        ({"depth": 0}, "depth is 0, must be there and not 0"),
        ({"width": "wide"}, "width is 'wide', must be a whole number"),
        ({"layers": [0]}, "layers is .*, must be a list of layers"),
        ({"head_dim": 7}, "head_dim even"),
        ({"theta": -1}, "theta is -1, must be a positive number"),
        ({"inner": 100}, "has shape"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(changes: dict[str, object], problem: str, tmp_path: Path) -> None:
    random_heads("eagle-3", TARGET, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(raw | changes), encoding="utf-8")
    with pytest.raises(CheckpointError, match=problem):
        load_network(tmp_path)


@pytest.mark.parametrize("layers", [1, 2, 3, 6, 8, 32])
def test_low_middle_and_high_features_come_from_layers_below_the_last(layers: int) -> None:
    found = low_middle_high(layers)
    assert all(1 <= layer < max(2, layers) for layer in found)
    assert list(found) == sorted(found)


def test_linears_on_a_device_take_and_return_float32() -> None:
    linear = torch.nn.Linear(5, 3)
    placed = _Placed(linear, torch.bfloat16, torch.device("cpu"))
    x = torch.randn(4, 5)
    expected = torch.nn.functional.linear(x.bfloat16(), linear.weight.bfloat16(), linear.bias.bfloat16())
    assert torch.equal(placed(x), expected.float())

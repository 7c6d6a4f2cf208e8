"""A cluster's file is read once: paths are relative to it, unknown keys and wrong values are named."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from outrider.config import DrafterConfig, GatewayConfig, RouterConfig, VerifierConfig, load_cluster
from outrider.errors import ConfigError

GOOD = """
[redis]
data = "state"
[router]
models = { target = "m/target" }
[[verifier]]
model = "m/target"
[[drafter]]
model = "/absolute/drafter"
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "cluster.toml"
    file.write_text(text)
    return file


def test_relative_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "m" / "target").mkdir(parents=True)
    cluster = load_cluster(written(tmp_path, GOOD))
    assert cluster.redis.data == tmp_path / "state"
    assert cluster.router.models["target"] == cluster.verifier[0].model == tmp_path / "m" / "target"
    assert cluster.verifier[0].model_name == "target"
    assert cluster.drafter[0].model == Path("/absolute/drafter")


def paths_of(kind: type[BaseModel]) -> list[str]:
    """The keys of a section that are paths."""
    return [name for name, field in kind.model_fields.items() if field.annotation in (Path, Path | None)]


def test_every_path_of_every_server_is_relative_to_the_file(tmp_path: Path) -> None:
    names = {"verifier": VerifierConfig, "drafter": DrafterConfig, "gateway": GatewayConfig, "router": RouterConfig}
    keys = {name: {key: f"./{key}" for key in paths_of(kind)} for name, kind in names.items()}
    assert {"model", "adapters", "store", "heads", "target", "ca", "cert", "key"} <= keys["drafter"].keys()
    text = "".join(
        f"[{f'[{name}]' if name in ('verifier', 'drafter') else name}]\n"
        + "".join(f"{key} = {value!r}\n" for key, value in values.items())
        + ("models = { m = './m' }\n" if name == "router" else "")
        for name, values in keys.items()
    )
    cluster = load_cluster(written(tmp_path, text))
    for section in (*cluster.verifier, *cluster.drafter, cluster.gateway, cluster.router):
        assert section is not None
        for key in paths_of(type(section)):
            assert getattr(section, key) == tmp_path / key


def test_a_name_on_the_hub_is_not_relative_to_the_file(tmp_path: Path) -> None:
    text = GOOD.replace("m/target", "org/name@v1") + 'target = "org/other"\nstore = "org/store"\n'
    cluster = load_cluster(written(tmp_path, text))
    assert cluster.router.models["target"] == cluster.verifier[0].model == Path("org/name@v1")
    assert cluster.verifier[0].model_name == "target"
    assert (cluster.drafter[0].target, cluster.drafter[0].store) == (Path("org/other"), tmp_path / "org" / "store")


def test_a_verifier_without_a_name_serves_its_checkpoint_under_the_routers_name_for_it(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, GOOD.replace("target = ", "large = ")))
    assert [*cluster.router.models] == [cluster.verifier[0].model_name] == ["large"]


def test_a_single_section_of_a_kind_needs_one_pair_of_brackets(tmp_path: Path) -> None:
    cluster = load_cluster(written(tmp_path, GOOD.replace("[[verifier]]", "[verifier]")))
    assert len(cluster.verifier) == 1


def test_layers_to_skip_are_a_list(tmp_path: Path) -> None:
    text = GOOD.replace("[[drafter]]", "[[drafter]]\ndtype = 'int4'\nskip = [3, 5]")
    drafter = load_cluster(written(tmp_path, text)).drafter[0]
    assert (drafter.dtype, drafter.layers, drafter.skip) == ("int4", None, (3, 5))


TIERS = """
[tier.0]
model = "m/mid"
level_nodes = 24
[[tier.1]]
model = "m/small"
[[tier.1]]
model = "m/target"
drafts = "suffix"
[tier.2]
model = "m/target"
drafts = "prompt-lookup"
above = 0
"""


def test_a_section_s_name_gives_its_tier_and_one_may_have_several_drafters(tmp_path: Path) -> None:
    (tmp_path / "m" / "mid").mkdir(parents=True)
    drafters = load_cluster(written(tmp_path, GOOD + TIERS)).drafters
    assert [(worker.tier, worker.upstream_tier) for worker in drafters] == [
        (0, None),
        (0, None),
        (1, 0),
        (1, 0),
        (2, 0),
    ]
    assert drafters[1].model == tmp_path / "m" / "mid"
    lower = load_cluster(written(tmp_path, GOOD + TIERS.replace("above = 0", "above = 1"))).drafters[-1]
    assert (lower.tier, lower.upstream_tier) == (2, 1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD + TIERS.replace("above = 0", "above = 2"), r"tier\.2\.0: .*tier 2 cannot draft for tier 2.*cycle"),
        (GOOD + TIERS.replace("[tier.0]", "[tier.0]\nabove = 1"), r"tier 0 cannot draft for tier 1.*cycle"),
        (TIERS.replace("[[tier.1]]", "[[tier.3]]") + GOOD, r"tier 3 drafts for tier 2, .*cannot judge"),
        (GOOD + "[tier.2]\nmodel = 'm/x'\n", r"tier 2 drafts for tier 1, and there is none"),
        (GOOD + TIERS.replace("[tier.0]", "[tier.0]\ntier = 4"), r"tier\.0\.tier: is 4, .*name gives 0"),
        (GOOD + TIERS.replace("[tier.0]", "[tier.top]"), r"tier\.top"),
    ],
)
def test_tiers_that_cannot_be_are_refused_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_cluster(written(tmp_path, text))


def test_a_verifier_may_look_ahead(tmp_path: Path) -> None:
    text = GOOD.replace("[[verifier]]", "[[verifier]]\nlookup = 'lookahead'")
    assert load_cluster(written(tmp_path, text)).verifier[0].lookup == "lookahead"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD.replace("[[verifier]]", "[[verifier]]\nthreds = 2"), r"verifier\.0\.threds: unknown key"),
        (GOOD.replace("[router]", "[router]\npad_stream_s = 0.05"), r"router\.pad_stream_s: is no longer there"),
        (GOOD.replace("[router]", "[router]\nlisten = 'localhost'"), r"router\.listen: .*HOST:PORT"),
        (GOOD.replace("[router]", "[router]\nwidth = 0"), r"router\.width: .*greater than or equal to 1"),
        (GOOD.replace("[[verifier]]", "[[verifiers]]"), r"verifier: .*required"),
        (GOOD.replace("[[drafter]]", "[[drafter]]\ndtype = 'int2'"), r"drafter\.0\.dtype: .*'int8' or 'int4'"),
        (GOOD.replace("[[verifier]]", "[[verifier]]\ndtype = 'int2'"), r"verifier\.0\.dtype: .*'int8' or 'int4'"),
        (GOOD.replace("[[verifier]]", "[[verifier]]\nlookup = 'ahead'"), r"verifier\.0\.lookup: .*or 'lookahead'"),
        (GOOD.replace("[[drafter]]", "[[drafter]]\ndrafts = 'lookahead'"), r"drafter\.0\.drafts: .*or 'retrieval'"),
        (GOOD.replace("[[drafter]]", "[[drafter]]\nlayers = 0"), r"drafter\.0\.layers: .*greater than or equal to 1"),
        (GOOD.replace("[[drafter]]", "[[drafter]]\nskip = [2, -1]"), r"drafter\.0\.skip\.1: .*equal to 0"),
        ("[router", "not valid TOML"),
    ],
)
def test_a_configuration_error_names_the_key_and_the_allowed_values(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_cluster(written(tmp_path, text))


TLS = """
[tls]
ca = "certs/ca.pem"
cert = "certs/{role}.pem"
key = "certs/{role}.key"
"""


def test_every_server_gets_its_roles_certificate_unless_it_has_its_own(tmp_path: Path) -> None:
    own = "[tier.1]\nmodel = 'm/small'\nca = 'x/ca.pem'\ncert = 'x/own.pem'\nkey = '/own.key'\n"
    cluster = load_cluster(written(tmp_path, TLS + GOOD + own))
    certs = tmp_path / "certs"
    for role, section in (
        ("router", cluster.with_certificate("router", cluster.router)),
        ("verifier", cluster.with_certificate("verifier", cluster.verifier[0])),
        ("drafter", cluster.drafters[0]),
    ):
        assert (section.ca, section.cert, section.key) == (
            certs / "ca.pem",
            certs / f"{role}.pem",
            certs / f"{role}.key",
        )
    other = cluster.drafters[1]
    assert (other.ca, other.cert, other.key) == (tmp_path / "x/ca.pem", tmp_path / "x/own.pem", Path("/own.key"))


@pytest.mark.parametrize("missing", ["ca", "cert", "key"])
def test_tls_names_all_three_files(tmp_path: Path, missing: str) -> None:
    text = "\n".join(line for line in TLS.splitlines() if not line.startswith(missing))
    with pytest.raises(ConfigError, match=rf"tls\.{missing}: .*required"):
        load_cluster(written(tmp_path, text + GOOD))

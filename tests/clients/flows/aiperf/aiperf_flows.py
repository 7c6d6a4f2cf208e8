"""AIPerf."""

import json
import subprocess
import sys
from pathlib import Path

from conftest import MODEL, URLS

ROOT = Path(__file__).parents[4]


def test_a_benchmark_runs_as_it_is_and_every_token_counts(tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"def f{number}(x):"}) for number in range(8)))
    for url in URLS:
        output = tmp_path / url.rpartition(":")[2]
        subprocess.run(
            [
                Path(sys.executable).parent / "aiperf",
                "profile",
                "--model",
                MODEL,
                "--url",
                url,
                "--endpoint-type",
                "chat",
            ]
            + [
                "--streaming",
                "--concurrency",
                "2",
                "--request-count",
                "8",
                "--input-file",
                data,
                "--artifact-dir",
                output,
            ]
            + ["--custom-dataset-type", "single_turn", "--extra-inputs", "ignore_eos:true", "--extra-inputs"]
            + [
                "max_tokens:24",
                "--use-server-token-count",
                "--tokenizer",
                ROOT / "models" / "target",
                "--ui-type",
                "none",
            ],
            check=True,
        )
        (found,) = output.rglob("profile_export_aiperf.json")
        figures = json.loads(found.read_text())
        assert figures["request_count"]["avg"] == 8
        assert figures["output_sequence_length"]["avg"] == 24

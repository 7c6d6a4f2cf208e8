"""lm-eval: the example's task of likelihoods."""

import json
import subprocess
import sys
from pathlib import Path

from conftest import MODEL

ROOT = Path(__file__).parents[4]


def test_a_task_of_likelihoods_has_its_score(same, tmp_path: Path) -> None:
    def ask(url: str) -> float:
        output = tmp_path / url.rpartition(":")[2]
        model = f"model={MODEL},base_url={url}/v1/completions,tokenizer={ROOT}/models/target,num_concurrent=4"
        subprocess.run(
            [Path(sys.executable).parent / "lm_eval", "--model", "local-completions", "--model_args", model]
            + ["--tasks", "python_endings", "--include_path", ".", "--batch_size", "8", "--output_path", output],
            cwd=ROOT / "examples" / "lm_eval",
            check=True,
        )
        (results,) = output.rglob("results_*.json")
        return json.loads(results.read_text())["results"]["python_endings"]["acc,none"]

    assert same(ask) > 0.5

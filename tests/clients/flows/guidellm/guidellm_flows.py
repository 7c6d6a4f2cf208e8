"""guidellm."""

import json
import subprocess
import sys
from pathlib import Path

from conftest import MODEL, URLS

ROOT = Path(__file__).parents[4]


def test_a_benchmark_runs_as_it_is(tmp_path: Path) -> None:
    for url in URLS:
        output = tmp_path / f"{url.rpartition(':')[2]}.json"
        subprocess.run(
            [Path(sys.executable).parent / "guidellm", "run", "--disable-console"]
            + ["--backend", f"kind=openai_http,target={url},model={MODEL}", "--profile", "kind=concurrent,streams=2"]
            + ["--constraint", "kind=max_requests,count=6", "--output", f"kind=json,path={output}"]
            + ["--tokenizer", f"kind=huggingface_auto,model={ROOT}/models/target"]
            + ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=24"],
            check=True,
        )
        (benchmark,) = json.loads(output.read_text())["benchmarks"]
        assert len(benchmark["requests"]["successful"]) == 6
        assert not benchmark["requests"]["errored"]
        assert {one["output_tokens"] for one in benchmark["requests"]["successful"]} == {24}

"""The candidate of a file of validation runs with the best mean of R@1 over what was tried (clean, label noise).

python research/choose.py runs.jsonl --among "5 mix" "5 trust"
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict


def main() -> None:
    """Print its name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--among", nargs="+", required=True, help="beginnings of names")
    options = parser.parse_args()
    scores: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    with open(options.file, encoding="utf-8") as file:
        for line in map(json.loads, file):
            if line["status"] == "done" and any(line["candidate"].startswith(each) for each in options.among):
                scores[line["candidate"]][line["noise"]].append(line["history"][-1]["test"]["recall_at_1"])

    def mean(name: str) -> float:
        by_noise = [sum(each) / len(each) for each in scores[name].values()]
        return sum(by_noise) / len(by_noise)

    complete = max(sum(map(len, each.values())) for each in scores.values())
    print(max((name for name in scores if sum(map(len, scores[name].values())) == complete), key=mean))


if __name__ == "__main__":
    main()

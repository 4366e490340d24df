"""`python -m dejavu.cluster --schema` prints the JSON Schema that editors use (dejavu/cluster.schema.json)."""

import argparse
import json

from dejavu.cluster.form import json_schema


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dejavu.cluster", description="The form of cluster.yaml.")
    parser.add_argument("--schema", action="store_true", required=True, help="print the JSON Schema, for editors")
    parser.parse_args(arguments)
    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()

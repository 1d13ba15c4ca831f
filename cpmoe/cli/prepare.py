"""`python -m cpmoe prepare`: tokenise a recipe's data into the folder that training maps."""

from __future__ import annotations

import argparse

from cpmoe.config.resolve import load_data


def main(arguments: list[str]) -> int:
    """Prepares and prints what the folder holds. Raises ValueError for a recipe or source that is refused."""
    parser = argparse.ArgumentParser(prog="python -m cpmoe prepare", description=__doc__)
    parser.add_argument("--recipe", required=True, help="YAML whose data block says what to tokenise")
    parser.add_argument("--force", action="store_true", help="replace a folder prepared in another way")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change one setting")
    options = parser.parse_intermixed_args(arguments)
    data = load_data(options.recipe, options.overrides)

    from cpmoe.data.prepare import prepare
    from cpmoe.data.store import open_prepared

    meta = open_prepared(prepare(data, force=options.force)).meta
    print(f"{data.path}: {data.source} as {data.tokenizer}, vocabulary {meta.vocab_size:,}")
    for split, documents in meta.documents.items():
        print(f"  {split:8} {documents:>12,} documents {meta.tokens[split]:>16,} tokens")
    return 0

"""Run schemathesis on the gateway's own OpenAPI document: `python -m tools.schema_storm SUITE [--cases N]`.

SUITE is its program, in an environment of its own. The gateway is a real one over fakes of every kind of model, in this
process: it shows that the document and the wire agree, not that models answer well. Ends with 1 on any failure, and
where fewer cases ran than were asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys

from tests.storms.every_kind import every_kind

CASES = 2000
# That a request fits its schema does not say that it fits the model: names, sizes, vocabularies, lengths, and fields
# that go together are refused by rules that no schema holds. All other checks are on.
LEFT_OUT = "positive_data_acceptance"
EXAMPLES = 25  # of each operation's fuzzing; its coverage phase has some hundred by itself
CASE = re.compile(r"(\d+) (?:test cases?|generated)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", help="the schemathesis program")
    parser.add_argument("--cases", type=int, default=CASES, help="that must run at least")
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="at most, of an operation's fuzzing")
    parser.add_argument("--seed", type=int, default=7)
    chosen, more = parser.parse_known_args()  # all else is schemathesis'
    return asyncio.run(_run(chosen, more))


async def _run(chosen: argparse.Namespace, more: list[str]) -> int:
    async with every_kind(videos_waiting=1_000_000) as kinds:  # a full queue is no fault
        url = kinds.served.url
        options = ["--url", url, "--seed", str(chosen.seed)]
        options += ["-n", str(chosen.examples), "--phases", "examples,coverage,fuzzing,stateful"]
        options += ["--request-timeout", "10", "--continue-on-failure", "--exclude-checks", LEFT_OUT, *more]
        suite = await asyncio.create_subprocess_exec(
            chosen.suite, "run", f"{url}/openapi.json", *options, stdout=asyncio.subprocess.PIPE
        )
        assert suite.stdout is not None
        counts = [0]
        async for line in suite.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            counts += map(int, CASE.findall(line.decode()))
        code = await suite.wait()
        await kinds.is_at_rest()
    if max(counts) < chosen.cases:
        print(f"only {max(counts)} cases ran, {chosen.cases} are due")
        return 1
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())

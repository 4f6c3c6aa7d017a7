"""How long a synchronous round takes: Gradbus beside what else there is, all in one run: `make bench`.

    python scripts/bench.py [--workers 2,4] [--sizes 4KB,45MB] [--contenders gradbus-tcp,torch-gloo] [--json FILE]
    python scripts/bench.py --profile FOLDER --contenders gradbus-tcp --workers 4 --sizes 4KB,4.3MB

A round: every worker has a float32 vector of the given size; in the end every worker has the mean (Gradbus: the new
weights). A contender that is not installed is a row that says so; `pip install -e '.[bench]'` brings them all.
"""

import sys

from bench.main import main

if __name__ == "__main__":
    sys.exit(main())

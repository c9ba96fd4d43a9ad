"""Print the job's own exit code: from status.json beside the result its last line names."""

import json
import sys
from pathlib import Path


def job_exit_code(output: str, torchrun_code: int) -> int:
    """The code in the JSON line ending ``output`` or in the status.json it leads to."""
    try:
        line = json.loads(output.strip().splitlines()[-1])
        if "exit_code" in line:
            return int(line["exit_code"])
        status = json.loads(Path(line["result"]).with_name("status.json").read_text())
        return int(status["exit_code"])
    except (IndexError, KeyError, OSError, TypeError, ValueError):
        return torchrun_code


if __name__ == "__main__":
    print(job_exit_code(Path(sys.argv[1]).read_text(), int(sys.argv[2])))

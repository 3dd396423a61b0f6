#!/bin/bash
# The first minutes on a GPU, smallest first: tests/gpu/first.sh [STAGE...]; --help lists the stages.
# Results are written to $OUT after each step.  PYTHON is the interpreter with torch for CUDA.
exec "${PYTHON:-python3}" "$(dirname "$0")/check.py" "$@"

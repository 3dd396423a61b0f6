#!/bin/sh
# Prints the commit since which `make lint` checks files: where HEAD left the main of the remote.  On
# this main itself: the last tag before HEAD, else five commits ago, else the first commit.
head=$(git rev-parse HEAD 2>/dev/null) || exit 0
for main in origin/HEAD origin/main; do
  base=$(git merge-base HEAD "$main" 2>/dev/null) || continue
  if [ "$base" != "$head" ]; then
    echo "$base"
    exit 0
  fi
done
git describe --tags --abbrev=0 HEAD^ 2>/dev/null || git rev-list --max-count=6 HEAD | tail -n 1

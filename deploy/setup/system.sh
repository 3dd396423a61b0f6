#!/bin/sh
# Installs system packages not available from pip.  As root on a Debian-like system, the script
# installs missing packages; otherwise the script lists missing packages and fails.
#
#   system.sh build|test|guest|browser|model|bench|rivals|demo|lint ...
set -eu

missing=
need() { # need PACKAGE CHECK...: adds the package to `missing` if the check fails
  package=$1
  shift
  "$@" >/dev/null 2>&1 || missing="$missing $package"
}
have() { command -v "$1"; }
have_bird() { PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin command -v bird; }
include() { echo "#include <$1>" | g++ -E -x c++ -; }
c_headers() { echo '#include <stdio.h>' | gcc -E -; }
python_headers() {
  "$PYTHON" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'
}
# The distribution's pyverbs works only with the distribution's Python.
has_pyverbs() {
  "$PYTHON" -c 'import sys
sys.path.append("/usr/lib/python3/dist-packages")
import pyverbs.device'
}
# Some systems ship the runtimes of clang's sanitizers and fuzzer in a separate package.
clang_sanitizes() {
  probe=$(mktemp)
  echo 'int main() { return 0; }' | clang++ -fsanitize=thread -x c++ - -o "$probe" &&
    echo 'extern "C" int LLVMFuzzerTestOneInput(const char *, long) { return 0; }' |
    clang++ -fsanitize=fuzzer -x c++ - -o "$probe"
  status=$?
  rm -f "$probe"
  return $status
}
# Prevents package installation from starting daemons; of prometheus, only promtool is needed.
start_no_daemon() {
  policy=/usr/sbin/policy-rc.d
  [ ! -e "$policy" ] || return 0
  trap 'rm -f "$policy"' EXIT
  trap 'exit 1' HUP INT TERM
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
}

check() {
  missing=
  for purpose in "$@"; do
    case $purpose in
      build)
        need g++ have g++
        need python3-venv "$PYTHON" -c 'import ensurepip'
        need python3-dev python_headers
        need libibverbs-dev include infiniband/verbs.h
        ;;
      test)
        need libgtest-dev include gtest/gtest.h
        need clang have clang++
        if have clang++ >/dev/null; then
          major=$(clang++ -dumpversion | cut -d. -f1)
          need "libclang-rt-$major-dev" clang_sanitizes
        fi
        need iproute2 have ip
        need nftables have nft
        need bird2 have_bird
        need procps have sysctl
        need spin have spin
        need prometheus have promtool
        need gdb have gdb
        ;;
      guest)
        need qemu-system-x86 have qemu-system-x86_64
        need busybox-static test -x /bin/busybox
        need kmod have modprobe
        need iproute2 have rdma
        need ibverbs-providers test -e /etc/libibverbs.d/rxe.driver
        need ibverbs-utils have ibv_devinfo
        need perftest have ib_write_lat
        need python3-pyverbs has_pyverbs
        ;;
      browser)
        need chromium have chromium
        ;;
      model)
        need spin have spin
        need gcc have gcc
        need libc6-dev c_headers
        ;;
      bench)
        need wrk have wrk
        need iproute2 have ip
        need nftables have nft
        ;;
      rivals)
        need bird2 have_bird
        need procps have sysctl
        ;;
      demo)
        need iproute2 have ip
        ;;
      lint)
        need libgtest-dev include gtest/gtest.h
        need clang have clang++
        need clang-format have clang-format
        need clang-tidy have clang-tidy
        ;;
      *)
        echo "system.sh: unknown purpose '$purpose'" >&2
        exit 2
        ;;
    esac
  done
}

PYTHON=${PYTHON:-python3}
PATH=$PATH:/usr/sbin:/sbin # folders of ip and nft, not in every user's PATH
check "$@"
# Two rounds: packages of the first round can reveal further missing packages.
for round in 1 2; do
  [ -n "$missing" ] || exit 0
  if [ "$(id -u)" -ne 0 ] || ! have apt-get >/dev/null; then
    break
  fi
  echo "installing:$missing"
  if [ "$round" -eq 1 ]; then
    start_no_daemon
    apt-get -o Acquire::Retries=3 update -qq
  fi
  # shellcheck disable=SC2086  # word splitting gives a word per package
  DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=3 install -qq -y --no-install-recommends $missing >/dev/null
  case " $missing " in
    *" prometheus "*) # also prevent a start at the next boot
      update-rc.d prometheus disable >/dev/null || echo "prometheus may start at the next boot" >&2
      ;;
  esac
  check "$@"
done
[ -n "$missing" ] || exit 0
echo "missing on this machine:$missing" >&2
echo "on Debian or Ubuntu: sudo apt-get install$missing" >&2
exit 1

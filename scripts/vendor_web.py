#!/usr/bin/env python3
"""Fetch the programs that the browser's keyboard runs on, and put them in the package.

Run it after a version below has changed: it asks npm and PyPI, checks what comes against the
sums below, and writes src/coterie/export/web_page/vendor/. Nothing else in the project asks the
network for them. `sums.json` there lists what was written, and a test compares it.
"""

import base64
import json
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from hashlib import sha256, sha512
from pathlib import Path

VENDOR = Path(__file__).parents[1] / "src/coterie/export/web_page/vendor"
ORT, TOKENIZERS = "1.30.0", "0.2.0"
# npm's own sums of whole packages: `npm view PACKAGE@VERSION dist.integrity`
PACKAGES = {
    f"onnxruntime-web@{ORT}": (
        "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
    ),
    f"@huggingface/tokenizers@{TOKENIZERS}": (
        "LidMHe1FpcSYH4vcSjXooda34pC0M8m1gmDOv7SQi6Iv+ib1zX7J3sHBCC9/3FPCkn2k1b55FneVqMRxrr99pg=="
    ),
}
# The smallest of onnxruntime-web's builds: the CPU alone, without WebGPU and WebNN. Modules are
# renamed, since not every server of static files knows .mjs.
FILES = {
    "dist/ort.wasm.bundle.min.mjs": "ort.wasm.bundle.min.js",
    "dist/ort-wasm-simd-threaded.wasm": "ort-wasm-simd-threaded.wasm.xz",
    "dist/tokenizers.min.mjs": "tokenizers.min.js",
    "LICENSE": "licences/tokenizers-LICENSE.txt",
}
# npm's onnxruntime-web has no licence in it: the same release on PyPI has
NOTICES = {
    "onnxruntime/LICENSE": "licences/onnxruntime-LICENSE.txt",
    "onnxruntime/ThirdPartyNotices.txt": "licences/onnxruntime-ThirdPartyNotices.txt",
}
README = f"""The programs that this page runs on, unchanged:

onnxruntime-web {ORT} (npm), by Microsoft, MIT License:
    ort.wasm.bundle.min.js, ort-wasm-simd-threaded.wasm
    onnxruntime-LICENSE.txt, onnxruntime-ThirdPartyNotices.txt
@huggingface/tokenizers {TOKENIZERS} (npm), by Hugging Face, Apache License 2.0:
    tokenizers.min.js
    tokenizers-LICENSE.txt
The page itself comes from coterie, Apache License 2.0.
"""


def main() -> None:
    """Fetch, check and write."""
    written = {"licences/README.txt": README.encode()}
    with tempfile.TemporaryDirectory() as folder:
        for package, integrity in PACKAGES.items():
            written |= from_npm(package, integrity, Path(folder))
        written |= from_pypi(Path(folder))
    sums = {}
    for name, content in sorted(written.items()):
        path = VENDOR / name
        path.parent.mkdir(parents=True, exist_ok=True)
        sums[name] = sha256(content).hexdigest()
        path.write_bytes(lzma.compress(content, preset=9) if path.suffix == ".xz" else content)
        print(f"{path.stat().st_size:>9,} {name}")
    (VENDOR / "sums.json").write_text(json.dumps(sums, indent=2) + "\n")


def from_npm(package: str, integrity: str, folder: Path) -> dict[str, bytes]:
    """The files of a package that are wanted, by their new names."""
    command = ["npm", "pack", package, "--pack-destination", str(folder), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    packed = folder / json.loads(done.stdout)[0]["filename"].replace("@", "").replace("/", "-")
    if base64.b64encode(sha512(packed.read_bytes()).digest()).decode() != integrity:
        sys.exit(f"{package} is not what it was: see PACKAGES")
    with tarfile.open(packed) as archive:
        members = {m.name.removeprefix("package/"): m for m in archive.getmembers()}
        return {
            new: archive.extractfile(members[old]).read()
            for old, new in FILES.items()
            if old in members
        }


def from_pypi(folder: Path) -> dict[str, bytes]:
    """The licences of ONNX Runtime, from the wheel of the same release."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    subprocess.run([*command, str(folder), f"onnxruntime=={ORT}"], check=True)
    with zipfile.ZipFile(next(folder.glob("onnxruntime-*.whl"))) as wheel:
        return {new: wheel.read(old) for old, new in NOTICES.items()}


if __name__ == "__main__":
    main()

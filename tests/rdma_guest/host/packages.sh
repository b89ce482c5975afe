# Debian packages: installed where root may, asked for in one sentence elsewhere. Sourced by ../guest.

BUILD_PACKAGES=(gcc make flex bison bc libc6-dev patch xz-utils)
RUN_PACKAGES=(ibverbs-providers ibverbs-utils iproute2 perftest ucx-utils)
QEMU_PACKAGES=(qemu-system-x86 kmod)

# require_packages NAME...: returns once all of them are installed; never upgrades what is there.
require_packages() {
  local name missing=()
  for name in "$@"; do
    [[ $(dpkg-query --show --showformat '${db:Status-Status}' "$name" 2>/dev/null) == installed ]] || missing+=("$name")
  done
  ((${#missing[@]})) || return 0
  [[ $(id -u) == 0 ]] || die "missing packages; as root: apt-get install --no-install-recommends ${missing[*]}"
  say "installing ${missing[*]}"
  refresh_package_lists
  DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends \
    --no-upgrade "${missing[@]}" >/dev/null </dev/null || die "apt-get could not install ${missing[*]}"
}

# unpack_package NAME FOLDER: the package's files under FOLDER; the machine itself stays as it is.
unpack_package() {
  local name=$1 folder=$2 download
  download=$(mktemp -d "$CACHE/download.XXXXXX")
  refresh_package_lists
  (cd "$download" && apt-get -qq download "$name" 2>/dev/null) || die "apt-get could not download $name"
  mkdir -p "$folder"
  dpkg-deb --extract "$download"/*.deb "$folder"
  rm -rf "$download"
}

# Lists are fetched once per run, and only where the wanted package may be unknown or superseded.
refresh_package_lists() {
  [[ -z ${LISTS_ARE_FRESH:-} ]] || return 0
  LISTS_ARE_FRESH=yes
  [[ $(id -u) != 0 ]] || apt-get -qq -o DPkg::Lock::Timeout=300 update || die "apt-get update failed"
}

# pyverbs from Debian works with any CPython 3.11. Installed the plain way it pulls a newer systemd in, so
# its files are only unpacked, into a folder that the guest has on its python path.
require_pyverbs() {
  [[ -d $PYVERBS/pyverbs ]] && return 0
  say "unpacking python3-pyverbs"
  unpack_package python3-pyverbs "$CACHE/pyverbs.unpacked"
  mv "$CACHE/pyverbs.unpacked/usr/lib/python3/dist-packages" "$PYVERBS"
  rm -rf "$CACHE/pyverbs.unpacked"
}

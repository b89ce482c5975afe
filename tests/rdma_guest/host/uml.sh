# The guest on User-Mode Linux: the kernel is an ordinary program of the host. Sourced by ../guest.

# The binary's name tells what it was built from, so that a changed configuration is built anew.
UML_KERNEL=$CACHE/linux-uml-$(cat "$HERE"/kernel/* | sha256sum | cut -c1-12)

uml_build() {
  [[ ! -x $UML_KERNEL ]] || return 0
  require_packages "${BUILD_PACKAGES[@]}"
  local build source
  build=$(mktemp -d "$CACHE/build.XXXXXX")
  say "unpacking Debian's linux-source-6.1"
  unpack_package linux-source-6.1 "$build"
  tar -xJf "$build"/usr/src/linux-source-6.1.tar.xz -C "$build"
  source=$build/linux-source-6.1
  say "building the kernel (about 4 minutes on two cores)"
  (
    set -e
    cd "$source"
    patch --quiet --strip=1 <"$HERE/kernel/xstate.patch"
    make -s ARCH=um x86_64_defconfig
    ARCH=um scripts/kconfig/merge_config.sh -m .config "$HERE/kernel/uml.config"
    make -s ARCH=um olddefconfig
    nice make -s ARCH=um -j"$(nproc)" linux
  ) >"$CACHE/build.log" 2>&1
  if [[ ! -x $source/linux ]]; then
    tail -n 20 "$CACHE/build.log" >&2
    rm -rf "$build"
    die "the kernel did not build; the whole log: $CACHE/build.log"
  fi
  strip -o "$UML_KERNEL.part" "$source/linux"
  mv "$UML_KERNEL.part" "$UML_KERNEL"
  rm -rf "$build"
}

# uml_run RUN TIMEOUT_S MEMORY_MIB: boots and hands over to $RUN/inside/init-uml. setpriv ends the kernel
# with this script, however the script ends.
uml_run() {
  local run=$1 timeout_s=$2 memory_mib=$3
  setpriv --pdeathsig TERM timeout --kill-after=5 "$timeout_s" "$UML_KERNEL" \
    mem="${memory_mib}M" uml_dir="$run/" loglevel=1 panic=-1 con=null con0=null,fd:1 \
    root=/dev/root rootfstype=hostfs rootflags=/ ro init=/bin/bash -- "$run/inside/init-uml" \
    </dev/null 2>"$run/kernel.log" | sed --unbuffered -e '/^sysrq: Power Off/d' -e '/^reboot: Power down/d'
  return "${PIPESTATUS[0]}"
}

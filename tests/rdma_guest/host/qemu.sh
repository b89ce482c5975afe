# The guest under qemu, with Debian's stock kernel: for machines where User-Mode Linux does not run (it needs
# ptrace). Without hardware virtualisation qemu emulates every instruction. Sourced by ../guest.

QEMU_FILES=$CACHE/qemu
QEMU_BUSYBOX=$QEMU_FILES/busybox/bin/busybox

# Kernel and busybox are unpacked, never installed: no boot loader of this machine hears of them.
qemu_build() {
  [[ ! -e $QEMU_FILES/initramfs.gz ]] || return 0
  require_packages "${QEMU_PACKAGES[@]}"
  rm -rf "$QEMU_FILES"
  mkdir -p "$QEMU_FILES"
  say "unpacking Debian's stock kernel"
  local image
  refresh_package_lists
  image=$(apt-cache depends linux-image-amd64 | awk '/Depends:/ {print $2; exit}')
  unpack_package "$image" "$QEMU_FILES/kernel"
  unpack_package busybox-static "$QEMU_FILES/busybox"
  depmod -b "$QEMU_FILES/kernel" "$(qemu_kernel_version)"
  qemu_initramfs
}

qemu_kernel_version() { ls "$QEMU_FILES/kernel/lib/modules"; }

# Just enough to mount the host's files over virtio-9p: busybox, four modules and what they depend on.
qemu_initramfs() {
  local tree=$QEMU_FILES/initramfs module
  mkdir -p "$tree/bin" "$tree/modules"
  cp "$QEMU_BUSYBOX" "$tree/bin/"
  for module in virtio_pci 9pnet_virtio 9p overlay; do
    modprobe -d "$QEMU_FILES/kernel" -S "$(qemu_kernel_version)" --show-depends "$module"
  done | awk '$1 == "insmod" && !seen[$2]++ {print $2}' >"$QEMU_FILES/modules"
  while read -r module; do
    cp "$module" "$tree/modules/"
    basename "$module"
  done <"$QEMU_FILES/modules" >"$tree/modules/order"
  install -m 755 "$HERE/inside/init-qemu" "$tree/init"
  (cd "$tree" && find . | "$QEMU_BUSYBOX" cpio -o -H newc 2>/dev/null | gzip -1) >"$QEMU_FILES/initramfs.part"
  mv "$QEMU_FILES/initramfs.part" "$QEMU_FILES/initramfs.gz"
}

# /dev/kvm alone proves nothing: the processor has to show vmx or svm as well.
qemu_processor() {
  if grep -qwE 'vmx|svm' /proc/cpuinfo && [[ -w /dev/kvm ]]; then
    echo "-accel kvm -cpu host"
  else
    echo "-accel tcg,thread=multi,tb-size=512 -cpu max,-pclmulqdq"
  fi
}

# qemu_run RUN TIMEOUT_S MEMORY_MIB: boots and hands over to $RUN/inside/start.
qemu_run() {
  local run=$1 timeout_s=$2 memory_mib=$3 out processor
  out=$(<"$run/out")
  read -ra processor <<<"$(qemu_processor)"
  qemu_kernel_version >"$run/kernel-version"
  printf '%s' "$QEMU_FILES" >"$run/qemu-files"
  setpriv --pdeathsig TERM timeout --kill-after=5 "$timeout_s" qemu-system-x86_64 "${processor[@]}" \
    -M q35 -m "$memory_mib" -smp 1 -nic none -no-reboot -nodefaults -display none -serial stdio \
    -device virtio-rng-pci -kernel "$QEMU_FILES/kernel/boot/vmlinuz-$(qemu_kernel_version)" \
    -initrd "$QEMU_FILES/initramfs.gz" -append "console=ttyS0 quiet panic=-1 mitigations=off" \
    -virtfs local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap \
    -virtfs "local,path=$run,mount_tag=run,security_model=none" \
    -virtfs "local,path=${out:-$run},mount_tag=out,security_model=none" \
    </dev/null 2>"$run/kernel.log" | sed --unbuffered '/reboot: Power down/d'
  return "${PIPESTATUS[0]}"
}

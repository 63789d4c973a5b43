# Nix package of this checkout, for Linux. The sources need no hash: they are this folder, and Cargo.lock has those of the crates.
#   nix-build -E '(import <nixpkgs> { }).callPackage ./deploy/nix/package.nix { }'
# Needs a nixpkgs with Rust 1.95 or newer.
{ lib, rustPlatform, installShellFiles }:
rustPlatform.buildRustPackage {
  pname = "cotenant";
  version = (lib.importTOML ../../Cargo.toml).workspace.package.version;
  src = lib.cleanSource ../..;
  cargoLock.lockFile = ../../Cargo.lock;
  # tests/run needs a network, published models and time.
  doCheck = false;
  nativeBuildInputs = [ installShellFiles ];
  postInstall = ''
    install -D -m 644 deploy/demo-model/demo.gguf $out/share/cotenant/demo.gguf
    mkdir man
    $out/bin/cotenant manual man
    installManPage man/*
    for shell in bash zsh fish; do
      $out/bin/cotenant completions $shell >cotenant.$shell
    done
    installShellCompletion cotenant.{bash,zsh,fish}
  '';
  meta = {
    description = (lib.importTOML ../../Cargo.toml).package.description;
    license = with lib.licenses; [ mit asl20 ];
    platforms = [ "x86_64-linux" "aarch64-linux" ];
    mainProgram = "cotenant";
  };
}

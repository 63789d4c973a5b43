# Homebrew formula for Linux. `deploy/release finish` makes it from this file: @PAGE@, @VERSION@ and @SHA256@ are the address of
# the repository, and the version and hash of the release's source archive.
class Cotenant < Formula
  desc "Memory supervisor for one board: LLM, speech-to-text and text-to-speech"
  homepage "@PAGE@"
  url "@PAGE@/releases/download/v@VERSION@/cotenant-@VERSION@-source.tar.gz"
  sha256 "@SHA256@"
  license any_of: ["MIT", "Apache-2.0"]

  depends_on "rust" => :build
  depends_on :linux

  def install
    system "cargo", "install", *std_cargo_args
    pkgshare.install "deploy/demo-model/demo.gguf"
    generate_completions_from_executable(bin/"cotenant", "completions")
    (buildpath/"man").mkpath
    system bin/"cotenant", "manual", buildpath/"man"
    man1.install Dir["man/*.1"]
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/cotenant --version")
    assert_path_exists pkgshare/"demo.gguf"
  end
end

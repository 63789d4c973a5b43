//! Configuration file argument: `FILE`, `--config FILE` or `$COTENANT_CONFIG`.

use std::path::PathBuf;

/// Where the configuration is.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ConfigFile {
    /// Configuration file [env: COTENANT_CONFIG] [default: /etc/cotenant/cotenant.yaml].
    #[arg(value_name = "FILE", conflicts_with = "config")]
    file: Option<PathBuf>,
    /// Configuration file, in place of FILE.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl ConfigFile {
    pub(super) fn path(&self) -> PathBuf {
        let named = self.file.as_ref().or(self.config.as_ref()).cloned();
        named
            .or_else(|| std::env::var_os("COTENANT_CONFIG").map(PathBuf::from))
            .unwrap_or_else(|| PathBuf::from("/etc/cotenant/cotenant.yaml"))
    }
}

//! `cotenant metrics`: contents of `/metrics`, also for node_exporter's textfile collector.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use super::{
    Global,
    exit::{self, CliError},
    output,
};

/// Arguments of `metrics`.
#[derive(Clone, Debug, clap::Args)]
pub struct Metrics {
    /// URL of the supervisor's metrics.
    #[arg(
        long,
        value_name = "URL",
        default_value = "http://127.0.0.1:8410/metrics"
    )]
    url: String,
    /// File with an API key; needed if API keys are required and `http.keyless` lacks `metrics`.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Replace this file atomically instead of writing to stdout: `DIR/cotenant.prom` for node_exporter with
    /// `--collector.textfile.directory=DIR`.
    #[arg(long, value_name = "FILE")]
    textfile: Option<PathBuf>,
}

/// Reads the metrics and writes them. If the supervisor does not respond, the file stays unchanged: node_exporter shows
/// its age.
pub(super) fn run(global: &Global, args: &Metrics) -> Result<(), CliError> {
    let text = read(global, args)?;
    match (&args.textfile, global.output) {
        (Some(path), _) => replace(path, &text)
            .map_err(|error| CliError::failed(format!("cannot write `{}`", path.display()), error)),
        (None, format) => output::write_list(format, samples(&text), || text.clone()),
    }
}

fn read(global: &Global, args: &Metrics) -> Result<String, CliError> {
    let unreachable = |cause: ureq::Error| {
        CliError::failed(format!("cannot read metrics from `{}`", args.url), cause)
            .with_hint("name the address of `http.listen` with --url".to_owned())
            .with_code(exit::UNREACHABLE)
    };
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(global.timeout))
        .http_status_as_error(false);
    let mut request = ureq::Agent::from(config.build())
        .get(&args.url)
        .header("accept", "text/plain");
    if let Some(path) = &args.key_file {
        let key = fs::read_to_string(path).map_err(|error| {
            CliError::failed(format!("cannot read `{}`", path.display()), error)
        })?;
        request = request.header("authorization", format!("Bearer {}", key.trim()));
    }
    let mut answer = request.call().map_err(unreachable)?;
    let status = answer.status().as_u16();
    if status != 200 {
        let hint = (status == 401).then(|| {
            "name a key file with --key-file, or add `metrics` to `http.keyless`".to_owned()
        });
        let error = format!(
            "cannot read metrics from `{}`: it answered {status}",
            args.url
        );
        return Err(CliError::plain(error, exit::REFUSED).with_hint(hint));
    }
    answer
        .body_mut()
        .with_config()
        .limit(TEXT_MAX)
        .read_to_string()
        .map_err(unreachable)
}

/// Replaces the file. The temporary file's name is ignored by the collector, which reads `*.prom`.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    let written = File::create(&new).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    let done = written.and_then(|()| fs::rename(&new, path));
    if done.is_err() {
        // Remove the incomplete file; the original error is reported.
        let _ = fs::remove_file(&new);
    }
    done
}

/// Returns each sample, with name and labels as one text.
fn samples(text: &str) -> impl Iterator<Item = Value> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let value = match (value.parse::<u64>(), value.parse::<f64>()) {
                (Ok(whole), _) => Value::from(whole),
                (_, Ok(number)) if number.is_finite() => Value::from(number),
                // Values without a JSON number stay text: `NaN`, `+Inf`.
                (_, Ok(_)) => Value::from(value),
                _ => return None,
            };
            Some(json!({ "series": series, "value": value }))
        })
}

/// Our choice: all metrics of a large stack take some 100 KiB.
const TEXT_MAX: u64 = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_textfile_is_replaced_whole_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cotenant.prom");
        replace(&path, "a 1\n").unwrap();
        replace(&path, "a 2\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "a 2\n");
        assert_eq!(folder.path().read_dir().unwrap().count(), 1);
        fs::create_dir(folder.path().join("folder")).unwrap();
        assert!(replace(&folder.path().join("folder"), "a 3\n").is_err());
        assert_eq!(folder.path().read_dir().unwrap().count(), 2);
    }

    #[test]
    fn comments_are_no_samples() {
        let found: Vec<Value> = samples("# TYPE a gauge\na{b=\"c d\"} 7\nx 0.5\n# EOF\n").collect();
        assert_eq!(
            found,
            [
                json!({"series": "a{b=\"c d\"}", "value": 7}),
                json!({"series": "x", "value": 0.5})
            ]
        );
    }
}

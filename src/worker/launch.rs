//! Command line of a worker from its specification.

use std::{
    env, fs, io,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    process::Command,
};

use super::{
    ports::{self, Claimed},
    spec::{Listen, WorkerSpec},
};
use cotenant_speech::client::Endpoint;

#[derive(Debug)]
pub(super) struct Launch {
    pub(super) command: Command,
    pub(super) program: String,
    pub(super) endpoint: Option<Endpoint>,
    /// Claim that keeps its port from other workers while it runs.
    pub(super) port: Option<Claimed>,
}

impl Launch {
    /// Substitutes variables, chooses a port if needed, and removes the socket of an earlier run.
    pub(super) fn prepare(spec: &WorkerSpec, variant: Option<&str>) -> Result<Self, LaunchError> {
        let (port, socket) = match &spec.listen {
            Listen::FreePort => (Some(Claimed::free().map_err(LaunchError::Port)?), None),
            Listen::Nowhere => (None, None),
            Listen::Port(port) => (Some(fixed(*port)?), None),
            Listen::Socket(path) => (None, Some(path.clone())),
        };
        if let Some(path) = &socket {
            let bytes = path.as_os_str().len();
            if bytes > SOCKET_PATH_BYTES_MAX {
                return Err(LaunchError::SocketPath {
                    path: path.clone(),
                    bytes,
                });
            }
            clear(path)?;
        }
        let number = port.as_ref().map(|port| port.port().to_string());
        let value = |variable: &str| {
            value_of(
                spec,
                variant,
                number.as_deref(),
                socket.as_deref(),
                variable,
            )
        };
        let mut words = Vec::new();
        for word in &spec.argv {
            words.push(substituted(word, value)?);
        }
        let mut words = words.into_iter();
        let program = words
            .next()
            .filter(|program| !program.is_empty())
            .ok_or(LaunchError::Empty)?;
        let mut command = Command::new(&program);
        command.args(words);
        command
            .env_clear()
            .envs(env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_inherited)));
        for (name, text) in &spec.env {
            command.env(
                name,
                substituted(text, |variable| named(variable).or_else(|| value(variable)))?,
            );
        }
        if let Some(folder) = &spec.working_dir {
            command.current_dir(folder);
        }
        Ok(Self {
            command,
            program,
            endpoint: match (&port, socket) {
                (Some(port), _) => Some(Endpoint::Tcp(format!("127.0.0.1:{}", port.port()))),
                (None, Some(path)) => Some(Endpoint::Unix(path)),
                (None, None) => None,
            },
            port,
        })
    }
}

/// Result of a hypothetical start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Foreseen {
    /// Program and arguments; a port chosen at the start is shown as `<a free port>`.
    pub argv: Vec<String>,
    /// Its address.
    pub endpoint: Option<String>,
    /// Process that uses its port, in words.
    pub taken_by: Option<String>,
}

/// Returns the result that a start of a worker in its first variant would have.
///
/// # Errors
/// If its command line cannot be built.
pub fn foresee(spec: &WorkerSpec) -> Result<Foreseen, LaunchError> {
    let (port, socket) = match &spec.listen {
        Listen::FreePort => (Some("<a free port>".to_owned()), None),
        Listen::Nowhere => (None, None),
        Listen::Port(port) => (Some(port.to_string()), None),
        Listen::Socket(path) => (None, Some(path.as_path())),
    };
    let variant = spec
        .memory
        .variants
        .first()
        .map(|variant| variant.name.as_str());
    let value = |variable: &str| value_of(spec, variant, port.as_deref(), socket, variable);
    let argv = spec
        .argv
        .iter()
        .map(|word| substituted(word, value))
        .collect::<Result<Vec<_>, _>>()?;
    if argv.first().is_none_or(String::is_empty) {
        return Err(LaunchError::Empty);
    }
    for text in spec.env.values() {
        substituted(text, |variable| named(variable).or_else(|| value(variable)))?;
    }
    let taken_by = match spec.listen {
        Listen::Port(port) => ports::listener(port).map(|owner| {
            let error = LaunchError::PortTaken { port, owner };
            error.to_string()
        }),
        _ => None,
    };
    Ok(Foreseen {
        argv,
        endpoint: match (&port, socket) {
            (Some(port), _) => Some(format!("tcp://127.0.0.1:{port}")),
            (None, Some(path)) => Some(Endpoint::Unix(path.to_owned()).to_string()),
            (None, None) => None,
        },
        taken_by,
    })
}

/// Returns whether a worker inherits a variable of the supervisor's environment: those about folders, languages,
/// libraries and devices. Others may be secrets of the supervisor or of another worker.
fn is_inherited(name: &str) -> bool {
    let is_secret = name
        .split('_')
        .any(|word| SECRET_WORDS.contains(&word.to_ascii_uppercase().as_str()));
    let is_proxy =
        name.ends_with("_proxy") && INHERITED.contains(&name.to_ascii_uppercase().as_str());
    let is_base = is_proxy || INHERITED.contains(&name);
    !is_secret
        && (is_base
            || INHERITED_PREFIXES
                .iter()
                .any(|prefix| name.starts_with(prefix)))
}

/// Returns the value of `${ENV:NAME}`, which passes any other variable of the supervisor to a worker.
fn named(variable: &str) -> Option<String> {
    env::var(variable.strip_prefix("ENV:")?).ok()
}

fn value_of(
    spec: &WorkerSpec,
    variant: Option<&str>,
    port: Option<&str>,
    socket: Option<&Path>,
    variable: &str,
) -> Option<String> {
    match variable {
        "NAME" => Some(spec.name.clone()),
        "PORT" => port.map(str::to_owned),
        "SOCKET" => socket.map(|path| path.to_string_lossy().into_owned()),
        "VARIANT" => variant.map(str::to_owned),
        "SELF" => own_program(),
        _ => None,
    }
}

/// Path of this program; if an upgrade has replaced it meanwhile, of the new one, since the old one has no path.
pub(crate) fn own_program() -> Option<String> {
    let path = env::current_exe().ok()?.to_string_lossy().into_owned();
    match path.strip_suffix(" (deleted)") {
        Some(replaced) if !Path::new(&path).exists() => Some(replaced.to_owned()),
        _ => Some(path),
    }
}

/// Reason why a command line cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The program is missing.
    #[error("argv is empty")]
    Empty,
    /// An unknown variable, or one without a value in this start.
    #[error("`${{{variable}}}` in `{text}` has no value")]
    Variable {
        /// Its name.
        variable: String,
        /// Text that contains it.
        text: String,
    },
    /// A variable without closing brace.
    #[error("`${{` in `{text}` has no `}}`")]
    Unclosed {
        /// Text that contains it.
        text: String,
    },
    /// The socket's path is too long for the kernel.
    #[error("socket path `{}` has {bytes} bytes, the kernel allows {SOCKET_PATH_BYTES_MAX}", path.display())]
    SocketPath {
        /// The path.
        path: PathBuf,
        /// Its length.
        bytes: usize,
    },
    /// The path of the socket is taken by another kind of file.
    #[error("`{}` exists at the socket's path, and is not a socket", path.display())]
    InTheWay {
        /// The path.
        path: PathBuf,
    },
    /// The old socket cannot be removed.
    #[error("cannot remove `{}`", path.display())]
    Socket {
        /// The path.
        path: PathBuf,
        /// Its error.
        source: io::Error,
    },
    /// Another process already listens on its port.
    #[error("port {port} of 127.0.0.1 is taken by {owner}")]
    PortTaken {
        /// The port.
        port: u16,
        /// The owner, if visible.
        owner: String,
    },
    /// No TCP port is free.
    #[error("cannot find a free TCP port on 127.0.0.1")]
    Port(#[source] io::Error),
}

/// Removes the socket of an earlier run, and nothing else.
fn clear(path: &Path) -> Result<(), LaunchError> {
    let failed = |source| LaunchError::Socket {
        path: path.to_owned(),
        source,
    };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed(error)),
        Ok(meta) if meta.file_type().is_socket() => fs::remove_file(path).map_err(failed),
        Ok(_) => Err(LaunchError::InTheWay {
            path: path.to_owned(),
        }),
    }
}

/// Returns `text` with every `${NAME}` replaced.
fn substituted(text: &str, value: impl Fn(&str) -> Option<String>) -> Result<String, LaunchError> {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, behind)) = rest.split_once("${") {
        result.push_str(before);
        let (variable, after) = behind
            .split_once('}')
            .ok_or_else(|| LaunchError::Unclosed {
                text: text.to_owned(),
            })?;
        result.push_str(&value(variable).ok_or_else(|| LaunchError::Variable {
            variable: variable.to_owned(),
            text: text.to_owned(),
        })?);
        rest = after;
    }
    result.push_str(rest);
    Ok(result)
}

/// Claims a port as configured, if it is free.
fn fixed(port: u16) -> Result<Claimed, LaunchError> {
    let taken = |owner| LaunchError::PortTaken { port, owner };
    let claimed = Claimed::fixed(port).ok_or_else(|| taken("another worker".to_owned()))?;
    match ports::listener(port) {
        Some(owner) => Err(taken(owner)),
        None => Ok(claimed),
    }
}

/// Names of inherited variables; those of proxies also exist in lower case.
const INHERITED: [&str; 22] = [
    "ALL_PROXY",
    "COTENANT_ENDPOINT",
    "CURL_CA_BUNDLE",
    "FTP_PROXY",
    "GLIBC_TUNABLES",
    "HOME",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "LANG",
    "LANGUAGE",
    "LOGNAME",
    "NO_PROXY",
    "PATH",
    "REQUESTS_CA_BUNDLE",
    "SHELL",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "TERM",
    "TMPDIR",
    "TZ",
    "USER",
    "VIRTUAL_ENV",
];

/// Prefixes of inherited variables: loaders, languages, and libraries used by speech servers.
const INHERITED_PREFIXES: [&str; 30] = [
    "ALSA_",
    "CONDA_",
    "CT2_",
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "ESPEAK_",
    "GGML_",
    "GOMP_",
    "HF_",
    "HIP_",
    "HSA_",
    "HUGGINGFACE_",
    "KMP_",
    "LC_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "NVIDIA_",
    "OMP_",
    "ONNXRUNTIME_",
    "OPENBLAS_",
    "ORT_",
    "PULSE_",
    "PYTHON",
    "RUST_",
    "TOKENIZERS_",
    "TORCH_",
    "TRANSFORMERS_",
    "XDG_",
];

/// Words that mark a variable as secret, even if it has an inherited prefix.
const SECRET_WORDS: [&str; 12] = [
    "APIKEY",
    "AUTH",
    "CREDENTIAL",
    "CREDENTIALS",
    "KEY",
    "KEYS",
    "PASSWD",
    "PASSWORD",
    "SECRET",
    "SECRETS",
    "TOKEN",
    "TOKENS",
];

/// `sun_path` of unix(7) has 108 bytes including its NUL.
const SOCKET_PATH_BYTES_MAX: usize = 107;

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(argv: &[&str]) -> WorkerSpec {
        WorkerSpec::new(
            "asr",
            argv.iter().map(|&word| word.to_owned()).collect(),
            Listen::Socket("/nowhere/asr.sock".into()),
        )
    }

    fn words(command: &Command) -> Vec<String> {
        command
            .get_args()
            .map(|word| word.to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn variables_are_filled_in() {
        let mut spec = spec(&[
            "prog",
            "--socket=${SOCKET}",
            "--as",
            "${NAME}-${VARIANT}",
            "$HOME",
            "$",
        ]);
        spec.env.insert("SOCK".into(), "${SOCKET}".into());
        let launch = Launch::prepare(&spec, Some("open")).unwrap();
        assert_eq!(launch.program, "prog");
        assert_eq!(
            words(&launch.command),
            [
                "--socket=/nowhere/asr.sock",
                "--as",
                "asr-open",
                "$HOME",
                "$"
            ]
        );
        assert_eq!(
            launch.endpoint.unwrap().to_string(),
            "unix:///nowhere/asr.sock"
        );
    }

    #[test]
    fn a_worker_has_what_it_needs_of_our_environment_and_no_secret() {
        for name in [
            "PATH",
            "HOME",
            "LC_ALL",
            "TZ",
            "LD_LIBRARY_PATH",
            "CUDA_VISIBLE_DEVICES",
            "HF_HOME",
            "https_proxy",
        ] {
            assert!(is_inherited(name), "{name}");
        }
        for name in [
            "TOKENIZERS_PARALLELISM",
            "PYTHONPATH",
            "XDG_CACHE_HOME",
            "MALLOC_ARENA_MAX",
            "OMP_NUM_THREADS",
        ] {
            assert!(is_inherited(name), "{name}");
        }
        let secrets = [
            "HF_TOKEN",
            "AWS_SECRET_ACCESS_KEY",
            "OPENAI_API_KEY",
            "HUGGINGFACE_API_KEY",
            "PGPASSWORD",
        ];
        for name in secrets.into_iter().chain([
            "NOTIFY_SOCKET",
            "LISTEN_FDS",
            "SUPERVISOR_TOKEN",
            "EDITOR",
            "path",
        ]) {
            assert!(!is_inherited(name), "{name}");
        }
        let mut spec = spec(&["prog"]);
        spec.env
            .insert("FOLDER".into(), "${ENV:PATH}/${NAME}".into());
        let launch = Launch::prepare(&spec, None).unwrap();
        let given: Vec<_> = launch
            .command
            .get_envs()
            .filter(|(name, _)| *name == "FOLDER")
            .collect();
        let expected = format!("{}/asr", env::var("PATH").unwrap());
        assert_eq!(given, [("FOLDER".as_ref(), Some(expected.as_ref()))]);
        // The tests' own environment contains many variables of cargo.
        let names: Vec<_> = launch
            .command
            .get_envs()
            .map(|(name, _)| name.to_str().unwrap().to_owned())
            .collect();
        assert!(names.iter().any(|name| name == "PATH"), "{names:?}");
        assert!(
            names
                .iter()
                .all(|name| name == "FOLDER" || is_inherited(name)),
            "{names:?}"
        );
        spec.env
            .insert("FOLDER".into(), "${ENV:COTENANT_NOT_SET}".into());
        let error = Launch::prepare(&spec, None).unwrap_err().to_string();
        assert_eq!(
            error,
            "`${ENV:COTENANT_NOT_SET}` in `${ENV:COTENANT_NOT_SET}` has no value"
        );
    }

    #[test]
    fn a_tcp_worker_gets_a_port_it_can_bind() {
        let mut spec = spec(&["prog", "${PORT}"]);
        spec.listen = Listen::FreePort;
        let launch = Launch::prepare(&spec, None).unwrap();
        let port = words(&launch.command).remove(0);
        assert_eq!(
            launch.endpoint.unwrap().to_string(),
            format!("tcp://127.0.0.1:{port}")
        );
        std::net::TcpListener::bind(("127.0.0.1", port.parse::<u16>().unwrap())).unwrap();
    }

    #[test]
    fn a_fixed_port_that_is_taken_is_refused_with_the_name_of_the_holder() {
        let socket = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        let mut spec = spec(&["prog"]);
        spec.listen = Listen::Port(port);
        let error = Launch::prepare(&spec, None).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("port {port} of 127.0.0.1 is taken by `")),
            "{error}"
        );
        drop(socket);
        let first = Launch::prepare(&spec, None).unwrap();
        let error = Launch::prepare(&spec, None).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("port {port} of 127.0.0.1 is taken by another worker")
        );
        drop(first);
        Launch::prepare(&spec, None).unwrap();
    }

    #[test]
    fn what_has_no_value_is_an_error_that_names_it() {
        for (argv, expected) in [
            (vec![], "argv is empty"),
            (vec!["", "x"], "argv is empty"),
            (
                vec!["p", "a${HOME}"],
                "`${HOME}` in `a${HOME}` has no value",
            ),
            (
                vec!["p", "${VARIANT}"],
                "`${VARIANT}` in `${VARIANT}` has no value",
            ),
            (vec!["p", "${SOCKET"], "`${` in `${SOCKET` has no `}`"),
        ] {
            assert_eq!(
                Launch::prepare(&spec(&argv), None).unwrap_err().to_string(),
                expected
            );
        }
        let mut long = spec(&["p"]);
        long.listen = Listen::Socket(PathBuf::from(format!("/{}", "x".repeat(129))));
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut blocked = spec(&["p"]);
        blocked.listen = Listen::Socket(file.path().to_owned());
        assert!(matches!(
            Launch::prepare(&blocked, None),
            Err(LaunchError::InTheWay { .. })
        ));
        assert!(file.path().exists());
        assert!(
            Launch::prepare(&long, None)
                .unwrap_err()
                .to_string()
                .ends_with("has 130 bytes, the kernel allows 107")
        );
    }
}

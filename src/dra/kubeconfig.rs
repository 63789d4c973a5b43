//! Address and credentials of the API server: the service account of a pod, or a kubeconfig.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

use base64::Engine as _;
use hyper::Uri;
use serde::Deserialize;

/// Where the API server is, and who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// `https://10.43.0.1:443`; `http` for a local proxy.
    pub server: Uri,
    /// Roots of its certificate, PEM; `None` for a server without TLS.
    pub roots: Option<Pem>,
    /// Certificate and key of a client, PEM.
    pub identity: Option<(Pem, Pem)>,
    /// Token of an account.
    pub token: Option<Token>,
}

/// PEM in a file, read again for each connection since it is renewed, or in the configuration.
#[derive(Clone, PartialEq, Eq)]
pub enum Pem {
    /// A file.
    File(PathBuf),
    /// The text.
    Text(Vec<u8>),
}

/// Bearer token.
#[derive(Clone, PartialEq, Eq)]
pub enum Token {
    /// In a file that kubelet renews.
    File(PathBuf),
    /// The text.
    Text(String),
}

/// The configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// A file cannot be read.
    #[error("cannot read `{}`", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// A kubeconfig is not one.
    #[error("cannot use kubeconfig `{}`: {problem}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The fault.
        problem: String,
    },
    /// Neither a kubeconfig nor a pod.
    #[error(
        "no API server is known: name a kubeconfig with --kubeconfig, or run as a pod with a service account"
    )]
    Nowhere,
}

impl Pem {
    /// Reads the text.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(&self) -> Result<Vec<u8>, AccessError> {
        match self {
            Self::File(path) => read(path),
            Self::Text(text) => Ok(text.clone()),
        }
    }
}

impl Token {
    /// Reads the token.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(&self) -> Result<String, AccessError> {
        match self {
            Self::File(path) => Ok(String::from_utf8_lossy(&read(path)?).trim().to_owned()),
            Self::Text(text) => Ok(text.clone()),
        }
    }
}

/// Keys and tokens are not shown.
impl std::fmt::Debug for Pem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pem")
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

impl Access {
    /// Returns the access by a kubeconfig, or without one that of the pod in which this process runs.
    ///
    /// # Errors
    /// If it cannot be read, or there is none.
    pub fn find(kubeconfig: Option<&Path>) -> Result<Self, AccessError> {
        match kubeconfig {
            Some(path) => Self::of_kubeconfig(path),
            None => Self::of_pod(Path::new(ACCOUNT)),
        }
    }

    fn of_pod(account: &Path) -> Result<Self, AccessError> {
        let variable = |name| env::var(name).map_err(|_| AccessError::Nowhere);
        let (host, port) = (
            variable("KUBERNETES_SERVICE_HOST")?,
            variable("KUBERNETES_SERVICE_PORT")?,
        );
        let host = if host.contains(':') {
            format!("[{host}]")
        } else {
            host
        };
        let server = format!("https://{host}:{port}");
        Ok(Self {
            server: server.parse().map_err(|_| AccessError::Nowhere)?,
            roots: Some(Pem::File(account.join("ca.crt"))),
            identity: None,
            token: Some(Token::File(account.join("token"))),
        })
    }

    fn of_kubeconfig(path: &Path) -> Result<Self, AccessError> {
        let malformed = |problem: &dyn ToString| AccessError::Malformed {
            path: path.to_owned(),
            problem: problem.to_string(),
        };
        let text = read(path)?;
        let config: Config = serde_yaml::from_slice(&text).map_err(|error| malformed(&error))?;
        let named = |list: &str, name: &str| malformed(&format!("`{list}` has no `{name}`"));
        let current = &config.current_context;
        let context = config.contexts.into_iter();
        let context = context
            .filter_map(|named| (named.name == *current).then_some(named.context))
            .next()
            .ok_or_else(|| named("contexts", current))?;
        let cluster = config.clusters.into_iter();
        let cluster = cluster
            .filter_map(|named| (named.name == context.cluster).then_some(named.cluster))
            .next()
            .ok_or_else(|| named("clusters", &context.cluster))?;
        let user = config.users.into_iter();
        let user = user
            .filter_map(|named| (named.name == context.user).then_some(named.user))
            .next()
            .ok_or_else(|| named("users", &context.user))?;
        let server: Uri = cluster
            .server
            .parse()
            .map_err(|_| malformed(&format!("server: `{}` is no URL", cluster.server)))?;
        if server.host().is_none() || !matches!(server.scheme_str(), Some("http" | "https")) {
            let problem = format!("server: `{}` is no http or https URL", cluster.server);
            return Err(malformed(&problem));
        }
        // Relative paths are those beside the file, as for kubectl.
        let folder = path.parent().unwrap_or(Path::new("."));
        let pem = |file: Option<PathBuf>, data: Option<String>, name: &str| match (file, data) {
            (_, Some(data)) => {
                let decoded = base64::engine::general_purpose::STANDARD.decode(data.trim());
                let text = decoded.map_err(|error| malformed(&format!("{name}: {error}")))?;
                Ok(Some(Pem::Text(text)))
            }
            (Some(file), None) => Ok(Some(Pem::File(folder.join(file)))),
            (None, None) => Ok(None),
        };
        let roots = pem(
            cluster.certificate_authority,
            cluster.certificate_authority_data,
            "certificate-authority-data",
        )?;
        if server.scheme_str() == Some("https") && roots.is_none() {
            return Err(malformed(
                &"the cluster has no certificate-authority, without which its certificate cannot be checked",
            ));
        }
        let certificate = pem(
            user.client_certificate,
            user.client_certificate_data,
            "client-certificate-data",
        )?;
        let key = pem(user.client_key, user.client_key_data, "client-key-data")?;
        let token = match (user.token_file, user.token) {
            (Some(file), _) => Some(Token::File(folder.join(file))),
            (None, Some(text)) => Some(Token::Text(text)),
            (None, None) => None,
        };
        Ok(Self {
            server,
            roots,
            identity: certificate.zip(key),
            token,
        })
    }
}

fn read(path: &Path) -> Result<Vec<u8>, AccessError> {
    fs::read(path).map_err(|source| AccessError::Read {
        path: path.to_owned(),
        source,
    })
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Config {
    current_context: String,
    #[serde(default)]
    contexts: Vec<NamedContext>,
    #[serde(default)]
    clusters: Vec<NamedCluster>,
    #[serde(default)]
    users: Vec<NamedUser>,
}

#[derive(Deserialize)]
struct NamedContext {
    name: String,
    context: Context,
}

#[derive(Deserialize)]
struct Context {
    cluster: String,
    user: String,
}

#[derive(Deserialize)]
struct NamedCluster {
    name: String,
    cluster: Cluster,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Cluster {
    server: String,
    certificate_authority: Option<PathBuf>,
    certificate_authority_data: Option<String>,
}

#[derive(Deserialize)]
struct NamedUser {
    name: String,
    user: User,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct User {
    client_certificate: Option<PathBuf>,
    client_certificate_data: Option<String>,
    client_key: Option<PathBuf>,
    client_key_data: Option<String>,
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
}

/// Folder of the account in a pod.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

#[cfg(test)]
mod tests {
    use super::*;

    fn config(cluster: &str, user: &str) -> Result<Access, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts:\n- {{name: a, context: {{cluster: c, user: u}}}}\n\
             clusters:\n- {{name: c, cluster: {{{cluster}}}}}\nusers:\n- {{name: u, user: {{{user}}}}}\n"
        );
        fs::write(&path, text).unwrap();
        Access::find(Some(&path)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_kubeconfig_names_server_roots_and_credentials() {
        let access = config(
            "server: 'https://127.0.0.1:6443', certificate-authority-data: YWJj",
            "client-certificate: kubelet.pem, client-key: /k/kubelet.pem",
        )
        .unwrap();
        assert_eq!(access.server.port_u16(), Some(6443));
        assert_eq!(access.roots, Some(Pem::Text(b"abc".to_vec())));
        let Some((Pem::File(certificate), Pem::File(key))) = access.identity else {
            unreachable!("both are files")
        };
        assert!(certificate.is_absolute() && certificate.ends_with("kubelet.pem"));
        assert_eq!(key, Path::new("/k/kubelet.pem"));
        let access = config("server: 'http://127.0.0.1:8001'", "token: t").unwrap();
        assert_eq!(access.token, Some(Token::Text("t".to_owned())));
    }

    #[test]
    fn what_is_missing_in_a_kubeconfig_is_named() {
        for (cluster, words) in [
            ("server: 'https://a:1'", "no certificate-authority"),
            ("server: 'a b'", "is no URL"),
            ("server: 'ftp://a'", "is no http or https URL"),
            (
                "server: 'https://a:1', certificate-authority-data: '?'",
                "certificate-authority-data: ",
            ),
            ("x: y", "missing field `server`"),
        ] {
            let error = config(cluster, "token: t").unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        let error = Access::find(Some(Path::new("/no/such/file"))).unwrap_err();
        assert_eq!(error.to_string(), "cannot read `/no/such/file`");
    }
}

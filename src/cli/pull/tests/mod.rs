//! `pull` against a server that speaks as the hubs do, with their faults.

mod server;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use tempfile::TempDir;

use self::server::{Reply, Request, Server};
use super::{
    PullArgs, Pulled,
    client::{Access, Client, Patience},
    hub::Hubs,
};
use crate::{exit, exit::CliError};
use cotenant_dev::weights::{Random, Weights as _, write_part};
use cotenant_engine::{
    spec::Architecture,
    synthetic::{Entry, Synthetic, TypeMix},
};

const PATIENCE: Patience = Patience {
    stall: Duration::from_millis(500),
    attempts: 3,
    pause: Duration::from_millis(1),
};

/// A model of about so many MiB.
fn model(mib: u32) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let f16 = TypeMix::named("f16").unwrap();
    let model = Synthetic {
        layers: (mib * 5 / 4).max(1),
        ..Synthetic::tiny(Architecture::Llama, f16, 7)
    };
    model.write(&path).unwrap();
    fs::read(&path).unwrap()
}

fn sha256(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    let digits = digest.as_ref().iter().map(|byte| format!("{byte:02x}"));
    digits.collect()
}

/// The list of a repository with these files.
fn tree(files: &[(&str, &[u8])]) -> Reply {
    let files: Vec<Value> = files
        .iter()
        .map(|(path, bytes)| {
            json!({"type": "file", "path": path, "size": bytes.len(), "oid": "0",
                "lfs": {"oid": sha256(bytes), "size": bytes.len(), "pointerSize": 135}})
        })
        .collect();
    Reply::json(&Value::Array(files))
}

const REFERENCE: &str = "hf.co/o/r";
const FILE: &str = "m-Q4_K_M.gguf";
const TREE: &str = "/api/models/o/r/tree/main?recursive=true";
const RESOLVE: &str = "/o/r/resolve/main/m-Q4_K_M.gguf";

/// A hub with the repository `o/r`, whose one file is served by `serve`.
fn hub(file: &[u8], serve: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Server {
    let list = tree(&[(FILE, file)]);
    Server::start(move |request| match request.path.as_str() {
        TREE => list.clone(),
        RESOLVE => serve(request),
        other => panic!("{other}"),
    })
}

fn args(reference: &str, to: &Path) -> PullArgs {
    PullArgs {
        model: reference.parse().unwrap(),
        to: to.to_owned(),
        sha256: None,
        force: false,
    }
}

fn pull_with(server: &Server, args: &PullArgs, token: Option<&str>) -> Result<Pulled, CliError> {
    let access = Access {
        base: format!("{}/", server.url()),
        token: token.map(str::to_owned),
    };
    let client = Client::new(access, PATIENCE).unwrap();
    let hubs = Hubs {
        hugging_face: server.url(),
        ollama: server.url(),
    };
    super::pull(&client, &hubs, args, &mut |_| Ok(()))
}

fn pull(server: &Server, reference: &str, to: &TempDir) -> Result<Pulled, CliError> {
    pull_with(server, &args(reference, to.path()), None)
}

/// The error with its causes and its hint.
fn text(error: &CliError) -> String {
    let causes = cotenant_units::causes::in_one_line(error);
    format!("{causes}; {}", error.hint().unwrap_or_default())
}

fn refused(result: Result<Pulled, CliError>, expected: &[&str]) {
    let text = text(&result.unwrap_err());
    for expected in expected {
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

fn names(folder: &TempDir) -> Vec<String> {
    let entries = fs::read_dir(folder.path()).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn is_there(folder: &TempDir, name: &str, file: &[u8]) {
    assert_eq!(names(folder), [name]);
    assert!(fs::read(folder.path().join(name)).unwrap() == file);
}

#[test]
fn a_model_is_planned_from_its_header_before_its_weights_are_fetched() {
    let file = model(8);
    let served = file.clone();
    let server = hub(&file, move |request| Reply::range(request, &served));
    let folder = tempfile::tempdir().unwrap();
    let part = folder.path().join(format!("{FILE}.part"));
    let access = Access {
        base: server.url(),
        token: None,
    };
    let client = Client::new(access, PATIENCE).unwrap();
    let hubs = Hubs {
        hugging_face: server.url(),
        ollama: server.url(),
    };
    let mut shown = String::new();
    let pulled = super::pull(
        &client,
        &hubs,
        &args(REFERENCE, folder.path()),
        &mut |plan| {
            shown = plan.text();
            assert!(plan.works());
            let here = fs::metadata(&part).unwrap().len();
            assert!(here < 2 << 20, "{here}");
            Ok(())
        },
    )
    .unwrap();
    assert!(shown.contains("verdict: fits"), "{shown}");
    is_there(&folder, FILE, &file);
    let document = pulled.json();
    assert_eq!(document["files"][0]["sha256"], sha256(&file));
    assert_eq!(document["files"][0]["verified"], true);
    // One for the list, one for the whole file.
    assert_eq!(server.seen().len(), 2);

    // What is there already is verified, and not fetched again.
    pull(&server, REFERENCE, &folder).unwrap();
    assert_eq!(server.seen().len(), 3);
    let mut other = file.clone();
    other[5_000_000] ^= 1;
    fs::write(folder.path().join(FILE), &other).unwrap();
    refused(pull(&server, REFERENCE, &folder), &["already exists"]);
    is_there(&folder, FILE, &other);
}

#[test]
fn a_model_of_ollamas_registry_is_its_model_layer() {
    let file = model(1);
    let digest = sha256(&file);
    let (served, blob) = (file.clone(), format!("/v2/library/m/blobs/sha256:{digest}"));
    let server = Server::start(move |request| match request.path.as_str() {
        "/v2/library/m/manifests/1b" => Reply::json(&json!({"schemaVersion": 2, "layers": [
            {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:00", "size": 1},
            {"mediaType": "application/vnd.ollama.image.model",
                "digest": format!("sha256:{digest}"), "size": served.len()},
        ]})),
        path if path == blob => Reply::range(request, &served),
        _ => Reply::status(404),
    });
    let folder = tempfile::tempdir().unwrap();
    pull(&server, "ollama.com/m:1b", &folder).unwrap();
    is_there(&folder, "m-1b.gguf", &file);
    let gone = pull(&server, "ollama.com/m:2b", &folder);
    refused(
        gone,
        &["/v2/library/m/manifests/2b", "404", "check the name"],
    );
}

#[test]
fn a_model_in_several_files_arrives_with_all_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let model = Synthetic::tiny(Architecture::Qwen3, TypeMix::Q4KM, 3);
    let tensors = model.tensors();
    let mut random = Random(3);
    let parts: Vec<(String, Vec<u8>)> = tensors
        .chunks(tensors.len().div_ceil(2))
        .enumerate()
        .map(|(number, some)| {
            let mut entries = match number {
                0 => model.metadata(),
                _ => Vec::new(),
            };
            let all = i32::try_from(tensors.len()).unwrap();
            entries.extend([
                ("split.no".to_owned(), Entry::Short(u16::from(number > 0))),
                ("split.count".to_owned(), Entry::Short(2)),
                ("split.tensors.count".to_owned(), Entry::Int(all)),
            ]);
            let name = format!("m-Q4_K_M-{:05}-of-00002.gguf", number + 1);
            let path = folder.path().join(&name);
            write_part(&path, &entries, some, &mut random).unwrap();
            let bytes = fs::read(&path).unwrap();
            fs::remove_file(&path).unwrap();
            (name, bytes)
        })
        .collect();
    let list: Vec<(&str, &[u8])> = parts
        .iter()
        .map(|(name, bytes)| (name.as_str(), &bytes[..]))
        .collect();
    let (list, served) = (tree(&list), parts.clone());
    let server = Server::start(move |request| {
        let name = request.path.rsplit('/').next().unwrap();
        match served.iter().find(|(part, _)| part == name) {
            Some((_, bytes)) => Reply::range(request, bytes),
            None => list.clone(),
        }
    });
    let pulled = pull(&server, REFERENCE, &folder).unwrap();
    assert!(pulled.text().ends_with("-00001-of-00002.gguf`\n"));
    assert_eq!(names(&folder).len(), 2);
    for (name, bytes) in &parts {
        assert!(fs::read(folder.path().join(name)).unwrap() == *bytes);
    }
}

#[test]
fn a_connection_that_breaks_off_is_resumed_where_it_was() {
    let file = model(8);
    let served = file.clone();
    let server = hub(&file, move |request| {
        Reply::range(request, &served).cut(900_001)
    });
    let folder = tempfile::tempdir().unwrap();
    pull(&server, REFERENCE, &folder).unwrap();
    is_there(&folder, FILE, &file);
    let starts: Vec<usize> = server.seen().iter().skip(1).map(Request::from).collect();
    let expected: Vec<usize> = (0..starts.len()).map(|count| count * 900_001).collect();
    assert_eq!(starts, expected);

    // Without progress it ends.
    let served = file.clone();
    let server = hub(&file, move |request| Reply::range(request, &served).cut(9));
    let folder = tempfile::tempdir().unwrap();
    let result = pull(&server, REFERENCE, &folder);
    refused(
        result,
        &["was interrupted", "no progress in 3 attempts", "pull again"],
    );
    assert_eq!(server.seen().len(), 4);
    let server = hub(&file, |_| Reply::status(503));
    let result = pull(&server, REFERENCE, &folder);
    refused(result, &["503", "no progress in 3 attempts"]);
}

#[test]
fn a_server_that_stays_silent_is_given_up() {
    let file = model(1);
    let served = file.clone();
    let server = hub(&file, move |request| Reply::range(request, &served));
    server.open(1000);
    let folder = tempfile::tempdir().unwrap();
    let result = pull(&server, REFERENCE, &folder);
    refused(result, &["was interrupted", "timeout", "no progress"]);
}

#[test]
fn a_server_without_ranges_is_read_from_the_beginning_and_not_forever() {
    let file = model(4);
    let (served, count) = (file.clone(), AtomicUsize::new(0));
    let server = hub(&file, move |_| {
        let whole = Reply::whole(&served);
        match count.fetch_add(1, Ordering::Relaxed) {
            0 => whole.cut(3_000_000),
            _ => whole,
        }
    });
    let folder = tempfile::tempdir().unwrap();
    pull(&server, REFERENCE, &folder).unwrap();
    is_there(&folder, FILE, &file);

    // Without a version to compare, no byte is continued.
    let (served, count) = (file.clone(), AtomicUsize::new(0));
    let server = Server::start(move |request| {
        let range = Reply::range(request, &served);
        match count.fetch_add(1, Ordering::Relaxed) {
            1 => range.cut(3_000_000),
            _ => range,
        }
    });
    let folder = tempfile::tempdir().unwrap();
    pull(&server, &format!("{}/{FILE}", server.url()), &folder).unwrap();
    is_there(&folder, FILE, &file);
    let starts: Vec<usize> = server.seen().iter().map(Request::from).collect();
    assert_eq!(starts, [0, 0, 0]);

    let served = file.clone();
    let server = hub(&file, move |_| Reply::whole(&served).cut(3_000_000));
    let folder = tempfile::tempdir().unwrap();
    refused(
        pull(&server, REFERENCE, &folder),
        &["no progress in 3 attempts"],
    );
}

#[test]
fn bytes_that_are_not_the_listed_ones_are_removed() {
    let file = model(2);
    let mut other = file.clone();
    *other.last_mut().unwrap() ^= 1;
    let server = hub(&file, move |request| Reply::range(request, &other));
    let folder = tempfile::tempdir().unwrap();
    let result = pull(&server, REFERENCE, &folder);
    refused(result, &[&sha256(&file), "SHA-256 of", "were removed"]);
    assert!(names(&folder).is_empty());

    let longer = [&file[..], b"x"].concat();
    let server = hub(&file, move |request| Reply::range(request, &longer));
    refused(
        pull(&server, REFERENCE, &folder),
        &["changed on its server"],
    );

    let served = file.clone();
    let server = hub(&file, move |request| {
        let mut reply = Reply::range(request, &served);
        let range = format!("bytes 5-{}/{}", served.len() - 1, served.len());
        reply.headers = vec![("content-range", range)];
        reply
    });
    let result = pull(&server, REFERENCE, &folder);
    refused(result, &["byte 5 instead of 0"]);

    let served = file.clone();
    let server = hub(&file, move |request| {
        Reply::range(request, &served).with("content-encoding", "gzip")
    });
    refused(pull(&server, REFERENCE, &folder), &["compressed"]);
}

#[test]
fn a_url_is_verified_by_the_digest_that_is_given() {
    let file = model(1);
    let served = file.clone();
    let server = Server::start(move |request| Reply::range(request, &served));
    let url = format!("{}/models/a%20b.gguf?token=secret", server.url());
    let folder = tempfile::tempdir().unwrap();
    let pulled = pull(&server, &url, &folder).unwrap();
    assert_eq!(pulled.json()["files"][0]["verified"], false);
    is_there(&folder, "a b.gguf", &file);
    refused(pull(&server, &url, &folder), &["already exists"]);

    let folder = tempfile::tempdir().unwrap();
    let with = |sha256: String| PullArgs {
        sha256: Some(sha256),
        ..args(&url, folder.path())
    };
    let result = pull_with(&server, &with("0".repeat(64)), None);
    let error = text(&result.unwrap_err());
    assert!(
        error.contains("SHA-256 of") && !error.contains("secret"),
        "{error}"
    );
    let pulled = pull_with(&server, &with(sha256(&file)), None).unwrap();
    assert_eq!(pulled.json()["files"][0]["verified"], true);
    // Now it can be compared.
    pull_with(&server, &with(sha256(&file)), None).unwrap();

    let of_a_hub = PullArgs {
        sha256: Some("0".repeat(64)),
        ..args(REFERENCE, folder.path())
    };
    refused(pull_with(&server, &of_a_hub, None), &["--sha256 is for"]);
}

/// A server of one file by its URL, of the version in `version`: its files differ in every byte of the weights.
fn versions(files: [Vec<u8>; 2], version: Arc<AtomicUsize>, cut: usize) -> Server {
    Server::start(move |request| {
        let now = version.load(Ordering::Relaxed);
        let tag = format!("\"{now}\"");
        let is_same = request
            .headers
            .get("if-range")
            .is_none_or(|asked| *asked == tag);
        let reply = match is_same {
            true => Reply::range(request, &files[now]),
            false => Reply::whole(&files[now]),
        };
        let reply = reply.with("etag", tag);
        match request.from() {
            0 => reply.cut(cut),
            _ => reply,
        }
    })
}

#[test]
fn a_file_that_changes_between_cut_and_resumption_is_never_mixed() {
    let file = model(4);
    let mut other = file.clone();
    let half = other.len() / 2;
    other[half..].iter_mut().for_each(|byte| *byte ^= 0x55);
    let version = Arc::new(AtomicUsize::new(0));
    let server = versions([file, other.clone()], Arc::clone(&version), 3_000_000);
    let url = format!("{}/m.gguf", server.url());
    let folder = tempfile::tempdir().unwrap();
    // It changes once the plan is shown, while the first response has not ended.
    let client = Client::new(
        Access {
            base: String::new(),
            token: None,
        },
        PATIENCE,
    );
    let client = client.unwrap();
    let hubs = Hubs {
        hugging_face: server.url(),
        ollama: server.url(),
    };
    let result = super::pull(&client, &hubs, &args(&url, folder.path()), &mut |_| {
        version.store(1, Ordering::Relaxed);
        Ok(())
    });
    refused(
        result,
        &["changed on its server", "another version", "pull again"],
    );
    assert_eq!(names(&folder), ["m.gguf.part", "m.gguf.part.json"]);
    // The bytes of the old version are not continued.
    pull(&server, &url, &folder).unwrap();
    is_there(&folder, "m.gguf", &other);
    let starts: Vec<usize> = server.seen().iter().map(Request::from).collect();
    assert_eq!(starts, [0, 0, 3_000_000, 0, 0, 3_000_000]);
}

#[test]
fn a_private_or_gated_repository_names_the_token() {
    let file = model(1);
    let served = file.clone();
    let server = hub(&file, move |request| {
        match request.headers.get("authorization").map(String::as_str) {
            Some("Bearer right") => Reply::range(request, &served),
            Some(_) => Reply::status(403).with("x-error-message", "Access is restricted"),
            None => Reply::status(401),
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let args = args(REFERENCE, folder.path());
    refused(pull_with(&server, &args, None), &["401", "set HF_TOKEN"]);
    let result = pull_with(&server, &args, Some("wrong"));
    refused(
        result,
        &[
            "403",
            "Access is restricted",
            "with the account of HF_TOKEN",
        ],
    );
    let result = pull_with(&server, &args, Some("wrong\nx-evil: 1"));
    refused(result, &["cannot fetch"]);
    pull_with(&server, &args, Some("right")).unwrap();
    is_there(&folder, FILE, &file);
}

#[test]
fn redirects_are_bounded_and_take_the_token_to_no_other_host() {
    let file = model(1);
    let served = file.clone();
    let store = Server::start(move |request| Reply::range(request, &served));
    // Another name is another host.
    let to = format!("http://localhost:{}/store", store.port());
    let server = hub(&file, move |_| Reply::redirect(to.clone()));
    let folder = tempfile::tempdir().unwrap();
    let args = args(REFERENCE, folder.path());
    pull_with(&server, &args, Some("secret")).unwrap();
    is_there(&folder, FILE, &file);
    let has_token = |request: &Request| request.headers.contains_key("authorization");
    assert!(server.seen().iter().all(has_token));
    let seen = store.seen();
    assert!(!seen.is_empty() && !seen.iter().any(has_token));

    let server = hub(&file, |request| Reply::redirect(request.path.clone()));
    let folder = tempfile::tempdir().unwrap();
    refused(pull(&server, REFERENCE, &folder), &["redirects"]);
    assert_eq!(server.seen().len(), 7);
}

#[test]
fn a_listing_that_is_no_listing_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (reply, expected) in [
        (Reply::whole(b"<!doctype html>"), "is unusable"),
        (
            Reply::whole(&vec![b' '; (16 << 20) + 1]),
            "more than 16 MiB",
        ),
        (Reply::json(&json!({"error": "x"})), "has no .gguf file"),
        (
            Reply::json(&json!([])).with("link", "<http://a/?cursor=b>; rel=\"next\""),
            "more files than one page",
        ),
        (
            Reply::json(&json!([{"path": FILE, "size": 1}])),
            "lists no SHA-256",
        ),
        (
            Reply::json(&json!([{"path": "../m-Q4_K_M.gguf",
                "lfs": {"oid": "0".repeat(64), "size": 1}}])),
            "cannot store a file",
        ),
        (
            Reply::json(
                &json!([{"path": FILE, "lfs": {"oid": "0".repeat(64), "size": 1u64 << 60}}]),
            ),
            "are free",
        ),
    ] {
        let server = Server::start(move |_| reply.clone());
        refused(pull(&server, REFERENCE, &folder), &[expected]);
        assert!(server.seen().len() == 1, "{expected}");
        assert!(names(&folder).is_empty(), "{expected}");
    }
}

#[test]
fn a_model_in_parts_of_which_one_is_another_file_leaves_nothing() {
    let parts = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"];
    let list = tree(&parts.map(|name| (name, &b"GGUF"[..])));
    let server = Server::start(move |_| list.clone());
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(parts[1]), b"another").unwrap();
    refused(pull(&server, REFERENCE, &folder), &["already exists"]);
    is_there(&folder, parts[1], b"another");
}

#[test]
fn an_encoder_is_fetched_without_a_plan_and_refused_if_it_gives_no_vectors() {
    let fixture = "../../tests/fixtures/bert/bert.gguf";
    let file = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(fixture)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let served = file.clone();
    let server = hub(&file, move |request| Reply::range(request, &served));
    let pulled = pull(&server, REFERENCE, &folder).unwrap();
    is_there(&folder, FILE, &file);
    let said = pulled.text();
    assert!(said.contains("`cotenant worker embed --model "), "{said}");

    let mut ranks = file;
    let key = b"bert.pooling_type";
    let at = ranks.windows(key.len()).position(|window| window == key);
    ranks[at.unwrap() + key.len() + 4] = 4;
    let served = ranks.clone();
    let server = hub(&ranks, move |request| Reply::range(request, &served));
    let folder = tempfile::tempdir().unwrap();
    refused(
        pull(&server, REFERENCE, &folder),
        &["pooling type 4 (rank) is not supported", "--force"],
    );
    assert!(names(&folder).is_empty());
}

#[test]
fn a_model_that_cannot_be_loaded_is_refused_before_its_weights() {
    let mut file = model(8);
    let name = b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama";
    let at = file.windows(name.len()).position(|some| some == name);
    let end = at.unwrap() + name.len();
    file[end - 5..end].copy_from_slice(b"mamba");
    let page = [&b"<!doctype html>"[..], &[b' '; 100]].concat();
    for (file, expected) in [
        (file.clone(), ["architecture `mamba`", "--force"]),
        (page, ["it is not GGUF", "--force"]),
    ] {
        let served = file.clone();
        let server = hub(&file, move |request| Reply::range(request, &served));
        let folder = tempfile::tempdir().unwrap();
        let error = pull(&server, REFERENCE, &folder).unwrap_err();
        assert_eq!(error.code(), exit::CONFIG);
        refused(
            Err(error),
            &[&expected[..], &["this machine cannot load"]].concat(),
        );
        assert!(names(&folder).is_empty());
        let forced = PullArgs {
            force: true,
            ..args(REFERENCE, folder.path())
        };
        pull_with(&server, &forced, None).unwrap();
        is_there(&folder, FILE, &file);
    }
}

#[test]
fn a_folder_that_cannot_be_written_and_a_second_pull_are_refused() {
    let file = model(1);
    let served = file.clone();
    let server = hub(&file, move |request| Reply::range(request, &served));
    let folder = tempfile::tempdir().unwrap();
    let part = folder.path().join(format!("{FILE}.part"));
    let held = fs::File::create(&part).unwrap();
    held.lock().unwrap();
    refused(
        pull(&server, REFERENCE, &folder),
        &["another pull writes it"],
    );
    drop(held);
    fs::remove_file(&part).unwrap();
    // A link to a file elsewhere is not followed.
    let elsewhere = folder.path().join("elsewhere");
    fs::write(&elsewhere, b"kept").unwrap();
    for (suffix, expected) in [("part", "--to"), ("part.json", "cannot write")] {
        let link = folder.path().join(format!("{FILE}.{suffix}"));
        std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
        refused(
            pull(&server, REFERENCE, &folder),
            &["cannot write", expected],
        );
        assert_eq!(fs::read(&elsewhere).unwrap(), b"kept");
        fs::remove_file(&link).unwrap();
    }
    let below = args(REFERENCE, &elsewhere.join("models"));
    refused(pull_with(&server, &below, None), &["cannot create", "--to"]);
}

/// Arguments of a child process, one on a line.
const CHILD: &str = "COTENANT_PULL_CHILD";

/// Runs this test program again as the whole command.
fn child(arguments: &[&str], variables: &[(&str, String)]) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "pull::tests::a_child_process_pulls_as_the_command_does",
        ])
        .args(["--nocapture", "--include-ignored"])
        .env(CHILD, arguments.join("\n"))
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

#[test]
#[ignore = "other tests run it in a process of its own"]
fn a_child_process_pulls_as_the_command_does() {
    let arguments = env::var(CHILD).unwrap();
    let arguments = ["cotenant", "pull"].into_iter().chain(arguments.lines());
    let code = crate::main(arguments.map(Into::into), "");
    assert_eq!(
        format!("{code:?}"),
        format!("{:?}", std::process::ExitCode::SUCCESS)
    );
}

fn succeeded(output: &Output) -> String {
    let (out, error) = (&output.stdout, String::from_utf8_lossy(&output.stderr));
    assert!(
        output.status.success(),
        "{}{error}",
        String::from_utf8_lossy(out)
    );
    String::from_utf8_lossy(out).into_owned()
}

#[test]
fn the_environment_names_mirror_token_and_proxy() {
    let file = model(1);
    let served = file.clone();
    let server = hub(&file, move |request| {
        match request.headers.get("authorization") {
            Some(token) if token == "Bearer mine" => Reply::range(request, &served),
            _ => Reply::status(401),
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().display().to_string();
    let output = child(
        &[REFERENCE, "--to", &to, "-o", "json"],
        &[
            ("HF_ENDPOINT", "http://mirror.invalid/".to_owned()),
            ("HF_TOKEN", "mine\n".to_owned()),
            ("HTTP_PROXY", server.url()),
            ("NO_PROXY", "other.invalid".to_owned()),
        ],
    )
    .output()
    .unwrap();
    let printed = succeeded(&output);
    let document = printed
        .split_once('{')
        .unwrap()
        .1
        .rsplit_once('}')
        .unwrap()
        .0;
    let document: Value = serde_json::from_str(&format!("{{{document}}}")).unwrap();
    assert_eq!(document["files"][0]["sha256"], sha256(&file));
    assert_eq!(document["plan"]["ok"], true);
    is_there(&folder, FILE, &file);
    assert!(server.seen()[0].path.starts_with("mirror.invalid:80"));

    let direct = child(
        &[REFERENCE, "--to", &to],
        &[
            ("HF_ENDPOINT", server.url()),
            ("HTTP_PROXY", "http://proxy.invalid:1".to_owned()),
            ("NO_PROXY", "127.0.0.1".to_owned()),
        ],
    );
    succeeded(&{ direct }.output().unwrap());
    let unusable = child(
        &[REFERENCE, "--to", &to],
        &[("HTTPS_PROXY", "gopher://x".to_owned())],
    )
    .output()
    .unwrap();
    assert!(!unusable.status.success());
    let error = String::from_utf8_lossy(&unusable.stderr).into_owned();
    assert!(error.contains("cannot use HTTPS_PROXY"), "{error}");
}

/// Ends a child by SIGKILL.
fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Kills a pull at many points of a file and while it completes, and looks at what is there each time.
#[test]
fn a_pull_that_is_killed_at_any_point_goes_on_with_the_right_bytes() {
    let file = model(6);
    let served = file.clone();
    let server = hub(&file, move |request| Reply::range(request, &served));
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().display().to_string();
    let path = folder.path().join(FILE);
    let part = folder.path().join(format!("{FILE}.part"));
    let start = || {
        let mut child = child(&[REFERENCE, "--to", &to], &[("HF_ENDPOINT", server.url())]);
        child
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let is_right = |path: &PathBuf, is_whole: bool| match fs::read(path) {
        Ok(bytes) => {
            assert!(file.starts_with(&bytes) && (!is_whole || bytes.len() == file.len()));
            bytes.len()
        }
        Err(_) => 0,
    };
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut kills = 0;
    for round in 0..3 {
        let mut here = 0;
        while here + (1 << 19) < file.len() {
            let gate = here + random.random_range(1 << 18..1 << 20);
            server.open(gate.min(file.len() - 1));
            let mut running = start();
            let at_gate = server.wait_at_gate(|| running.try_wait().unwrap().is_some());
            if at_gate {
                // The bytes up to the gate are on their way through this process.
                std::thread::sleep(Duration::from_micros(random.random_range(0..3000)));
            }
            kill(running);
            kills += 1;
            assert!(kills < 1000, "no progress at {here}");
            assert_eq!(is_right(&path, true), 0);
            here = is_right(&part, false);
        }
        // All bytes are sent; it ends somewhere between the last write and its last step.
        server.open(usize::MAX);
        for _ in 0..6 {
            let running = start();
            std::thread::sleep(Duration::from_micros(random.random_range(0..150_000)));
            kill(running);
            kills += 1;
            is_right(&path, true);
            is_right(&part, false);
        }
        succeeded(
            &child(&[REFERENCE, "--to", &to], &[("HF_ENDPOINT", server.url())])
                .output()
                .unwrap(),
        );
        is_there(&folder, FILE, &file);
        fs::remove_file(&path).unwrap();
        println!("round {round}: {kills} kills");
    }
    assert!(kills > 36, "{kills}");
}

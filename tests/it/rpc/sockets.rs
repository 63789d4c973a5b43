//! Sockets in use, stale sockets, and other files in their place.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, net::UnixListener},
};

use cotenant::rpc::Sockets;

#[test]
fn what_a_dead_supervisor_left_is_taken_over_and_a_living_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cotenant.sock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "left behind");
    let mut sockets = Sockets::new();
    sockets.bind_path(&path, 0o660).unwrap();
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o660
    );

    let error = Sockets::new().bind_path(&path, 0o660).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "cannot listen on `{}`: another process answers there",
            path.display()
        )
    );
    drop(sockets);
    assert!(!path.exists());
}

#[test]
fn a_file_is_not_removed_for_a_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("precious");
    fs::write(&path, "data").unwrap();
    let error = Sockets::new().bind_path(&path, 0o660).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("a file that is no socket is there"),
        "{error}"
    );
    assert_eq!(fs::read_to_string(&path).unwrap(), "data");
}

#[test]
fn a_path_that_is_too_long_or_has_no_folder_is_an_error_with_a_hint() {
    let folder = tempfile::tempdir().unwrap();
    let long = folder.path().join("x".repeat(120));
    let error = Sockets::new().bind_path(&long, 0o660).unwrap_err();
    assert!(
        error.to_string().starts_with("cannot listen on `"),
        "{error}"
    );
    assert!(error.hint().contains("107"));
    let nowhere = folder.path().join("no/such/folder.sock");
    assert!(Sockets::new().bind_path(&nowhere, 0o660).is_err());
}

#[test]
fn an_abstract_name_is_taken_once() {
    let name = format!("cotenant-test-sockets-{}", std::process::id());
    let mut sockets = Sockets::new();
    sockets.bind_abstract(&name).unwrap();
    let error = Sockets::new().bind_abstract(&name).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("cannot listen on `@{name}`: another process answers there")
    );
}

//! Who may use the APIs; may change while they are served.

/// Who may use the APIs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Host names besides those of this machine under which they are served.
    pub hosts: Vec<String>,
}

//! Events and actions as lines, to write and to replay.

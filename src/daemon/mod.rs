//! The loop that joins the modules: events in, actions out.

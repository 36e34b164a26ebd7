//! To whom this process belongs: attaching to an owner, or being one itself.

use std::path::PathBuf;
use std::time::Duration;

use millpond_allocator::driver::cuda::HandleKind;
use millpond_ipc::client::{Channel, Client, Error, OnOwnerDeath, Options, Place};
use millpond_ipc::owner::{Config, DriverChoice, Inline, Limit, OwnerError};
use millpond_ipc::wire::Role;
use parking_lot::Mutex;
use serde_json::{json, Value};

use super::request::{Attach, OwnerDeath, Serve};
use crate::error::{ApiError, Result};
use crate::{state, tensor};

pub(super) fn attach(op: Attach) -> Result<Value> {
    let mut options = Options::new(PathBuf::from(op.socket), op.key, op.name.unwrap_or_else(|| format!("pid {}", std::process::id())));
    options.role = op.role.unwrap_or(Role::Worker);
    options.limit = op.limit;
    options.on_owner_death = match op.on_owner_death {
        OwnerDeath::Continue => OnOwnerDeath::Continue,
        OwnerDeath::Exit => OnOwnerDeath::Exit,
    };
    options.host_waits = op.wait.as_deref() == Some("host");
    options.python = op.python;
    options.torch = op.torch;
    if let Some(ms) = op.timeout_ms {
        options.timeout = Duration::from_millis(ms);
    }
    Ok(described(&*state::attach(&options)?))
}

fn described(client: &Client) -> Value {
    let welcome = client.welcome();
    let devices: Vec<Value> = client
        .grants()
        .map(|grant| {
            let host = grant.device.starts_with("HOST-");
            let ordinal = grant.device.parse().ok().and_then(|id| client.ordinal(Place::Device(id)));
            let ordinal = if host { Value::from(-1) } else { ordinal.map_or(Value::Null, Value::from) };
            json!({"id": grant.device, "ordinal": ordinal, "host": host, "name": grant.name, "total": grant.total, "limit": grant.limit,
                   "chunk_bytes": grant.chunk_bytes, "window": grant.window, "window_bytes": grant.window_bytes})
        })
        .collect();
    json!({"client": welcome.client, "serial": welcome.serial, "token": welcome.token, "owner_pid": welcome.owner_pid, "devices": devices})
}

pub(super) fn status() -> Value {
    let Some(client) = state::if_attached() else { return json!({ "attached": false, "forked": state::is_forked() }) };
    let mut status = described(&client);
    if let Value::Object(map) = &mut status {
        map.insert("attached".to_owned(), true.into());
        map.insert("socket".to_owned(), client.socket().display().to_string().into());
        map.insert("owner_alive".to_owned(), client.owner_alive().into());
    }
    status
}

pub(super) fn channel(channel: Channel) -> Value {
    let peer = channel.peer().clone();
    json!({"channel": tensor::keep(channel), "peer": {"client": peer.client, "serial": peer.serial, "name": peer.name, "pid": peer.pid}})
}

/// The owner of this process's own, if it has one.
static INLINE: Mutex<Option<Inline>> = Mutex::new(None);

pub(super) fn serve_inline(settings: &Serve) -> Result<Value> {
    let mut inline = INLINE.lock();
    if let Some(owner) = &*inline {
        return Err(ApiError::AlreadyAttached(owner.socket().display().to_string()));
    }
    let config = Config {
        driver: match settings.driver.as_deref() {
            None | Some("auto") => DriverChoice::Auto,
            Some("host") => DriverChoice::Host,
            Some("cuda") => DriverChoice::Cuda,
            Some(other) => return Err(ApiError::argument(format!("no driver {other:?}: expected auto, host or cuda"))),
        },
        limit: match &settings.limit {
            None => Limit::Percent(100.0),
            Some(Value::String(limit)) => limit.parse().map_err(ApiError::argument)?,
            Some(limit) => Limit::Bytes(limit.as_u64().ok_or_else(|| ApiError::argument(format!("a limit of {limit}")))?),
        },
        chunk_bytes: settings.chunk_bytes,
        handle_kind: settings.handle_kind.as_deref().map_or(Ok(HandleKind::default()), str::parse).map_err(ApiError::argument)?,
        ..Config::default()
    };
    let refused = |error: OwnerError| match error {
        OwnerError::HandleKind { .. } => ApiError::Client(Error::Unsupported(error.to_string())),
        error => ApiError::argument(error.to_string()),
    };
    let owner = inline.insert(Inline::start(config).map_err(refused)?);
    Ok(json!({ "socket": owner.socket().display().to_string(), "key": owner.key() }))
}

pub(super) fn stop_inline() {
    drop(INLINE.lock().take());
}

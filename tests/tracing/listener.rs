//! A subscriber for the whole test process: keeps what it hears, and does what a test asks of it meanwhile.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

/// An event or a span, as it was heard.
#[derive(Clone, Debug)]
pub struct Heard {
    pub name: String,
    pub level: Level,
    pub target: String,
    pub is_span: bool,
    /// Without the message.
    pub fields: BTreeSet<String>,
    /// `name=value`, for messages of tests.
    pub values: Vec<String>,
}

type Hook = Arc<dyn Fn(&str) + Send + Sync>;

static HEARD: Mutex<Vec<Heard>> = Mutex::new(Vec::new());
static HOOK: Mutex<Option<Hook>> = Mutex::new(None);
static TURN: Mutex<()> = Mutex::new(());

thread_local! {
    /// What the hook does is not heard, or it would hear itself.
    static IN_HOOK: Cell<bool> = const { Cell::new(false) };
    /// How often this thread came to a place where something could be said.
    static ASKED: Cell<u64> = const { Cell::new(0) };
}

/// The only test that listens, until it is dropped.
pub struct Turn(#[allow(dead_code)] MutexGuard<'static, ()>);

pub fn listen() -> Turn {
    static INSTALLED: Once = Once::new();
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    INSTALLED.call_once(|| tracing::subscriber::set_global_default(Listener).expect("the first one"));
    lock(&HEARD).clear();
    Turn(turn)
}

impl Turn {
    /// What was heard since the last call.
    pub fn heard(&self) -> Vec<Heard> {
        std::mem::take(&mut lock(&HEARD))
    }

    /// Done at every event, on its thread, from inside the subscriber.
    pub fn at_every_event(&self, hook: impl Fn(&str) + Send + Sync + 'static) {
        let before = lock(&HOOK).replace(Arc::new(hook));
        assert!(before.is_none(), "one hook a test");
    }

    /// How often this thread came to a place where something could be said, whether or not it was.
    pub fn asked_on_this_thread(&self) -> u64 {
        ASKED.get()
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Its pool may end with it, and say so.
        let hook = lock(&HOOK).take();
        drop(hook);
    }
}

struct Listener;

impl Listener {
    fn hear(&self, metadata: &Metadata<'_>, record: impl FnOnce(&mut Fields)) {
        let mut fields = Fields::default();
        record(&mut fields);
        lock(&HEARD).push(Heard {
            name: metadata.name().to_owned(),
            level: *metadata.level(),
            target: metadata.target().to_owned(),
            is_span: metadata.is_span(),
            fields: fields.names,
            values: fields.values,
        });
        let hook = lock(&HOOK).clone();
        if let Some(hook) = hook {
            IN_HOOK.set(true);
            hook(metadata.name());
            IN_HOOK.set(false);
        }
    }
}

impl Subscriber for Listener {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        // Asked every time, so that every place where something could be said is seen.
        Interest::sometimes()
    }

    fn enabled(&self, _: &Metadata<'_>) -> bool {
        ASKED.set(ASKED.get() + 1);
        !IN_HOOK.get()
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        self.hear(span.metadata(), |fields| span.record(fields));
        Id::from_u64(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        self.hear(event.metadata(), |fields| event.record(fields));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Fields {
    names: BTreeSet<String>,
    values: Vec<String>,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() != "message" {
            self.names.insert(field.name().to_owned());
            self.values.push(format!("{}={value:?}", field.name()));
        }
    }
}

fn lock<T>(mutex: &'static Mutex<T>) -> MutexGuard<'static, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! CPython's functions, by name: 3.9 and later.

use std::ffi::{c_char, c_int, c_void, CStr};
use std::mem::transmute_copy;
use std::ptr::null_mut;
use std::sync::OnceLock;

use super::table::{Code, Key};

type Object = *mut c_void;

/// The functions that are needed. Objects are CPython's, all else is C's.
pub(super) struct Python {
    is_initialized: unsafe extern "C" fn() -> c_int,
    is_finalizing: unsafe extern "C" fn() -> c_int,
    own_state: unsafe extern "C" fn() -> *mut c_void,
    current_state: unsafe extern "C" fn() -> *mut c_void,
    first_interpreter: unsafe extern "C" fn() -> *mut c_void,
    next_interpreter: unsafe extern "C" fn(*mut c_void) -> *mut c_void,
    ensure: unsafe extern "C" fn() -> c_int,
    release: unsafe extern "C" fn(c_int),
    frame: unsafe extern "C" fn() -> Object,
    back: unsafe extern "C" fn(Object) -> Object,
    code: unsafe extern "C" fn(Object) -> Object,
    /// 3.11 and later. Before, a frame's line is at hand.
    last_instruction: Option<unsafe extern "C" fn(Object) -> c_int>,
    line: unsafe extern "C" fn(Object) -> c_int,
    line_of: unsafe extern "C" fn(Object, c_int) -> c_int,
    take: unsafe extern "C" fn(Object),
    drop: unsafe extern "C" fn(Object),
    attribute: unsafe extern "C" fn(Object, *const c_char) -> Object,
    text: unsafe extern "C" fn(Object, *mut isize) -> *const c_char,
    fetch: unsafe extern "C" fn(*mut Object, *mut Object, *mut Object),
    restore: unsafe extern "C" fn(Object, Object, Object),
}

/// One function of the process by its names, the first that is there.
///
/// # Safety
/// `F` is the type of a pointer to that function.
unsafe fn function<F>(names: &[&CStr]) -> Option<F> {
    let found = names.iter().map(|name| {
        // SAFETY: a terminated string; the default scope holds what `ctypes.pythonapi` finds.
        unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
    });
    let address = found.into_iter().find(|address| !address.is_null())?;
    // SAFETY: by this function's contract; a function's pointer is as large as any.
    (size_of::<F>() == size_of::<*mut c_void>()).then(|| unsafe { transmute_copy(&address) })
}

impl Python {
    /// This process's Python, if it has one.
    pub(super) fn get() -> Option<&'static Self> {
        static PYTHON: OnceLock<Option<Python>> = OnceLock::new();
        PYTHON.get_or_init(Self::find).as_ref()
    }

    fn find() -> Option<Self> {
        // SAFETY: the types are those of CPython's headers, 3.9 to 3.14.
        unsafe {
            Some(Self {
                is_initialized: function(&[c"Py_IsInitialized"])?,
                is_finalizing: function(&[c"Py_IsFinalizing", c"_Py_IsFinalizing"])?,
                own_state: function(&[c"PyGILState_GetThisThreadState"])?,
                current_state: function(&[c"PyThreadState_GetUnchecked", c"_PyThreadState_UncheckedGet"])?,
                first_interpreter: function(&[c"PyInterpreterState_Head"])?,
                next_interpreter: function(&[c"PyInterpreterState_Next"])?,
                ensure: function(&[c"PyGILState_Ensure"])?,
                release: function(&[c"PyGILState_Release"])?,
                frame: function(&[c"PyEval_GetFrame"])?,
                back: function(&[c"PyFrame_GetBack"])?,
                code: function(&[c"PyFrame_GetCode"])?,
                last_instruction: function(&[c"PyFrame_GetLasti"]),
                line: function(&[c"PyFrame_GetLineNumber"])?,
                line_of: function(&[c"PyCode_Addr2Line"])?,
                take: function(&[c"Py_IncRef"])?,
                drop: function(&[c"Py_DecRef"])?,
                attribute: function(&[c"PyObject_GetAttrString"])?,
                text: function(&[c"PyUnicode_AsUTF8AndSize"])?,
                fetch: function(&[c"PyErr_Fetch"])?,
                restore: function(&[c"PyErr_Restore"])?,
            })
        }
    }

    /// Does something with the GIL held: where this thread holds it, or may take it. `None` where it may not, in a thread that
    /// Python does not know, and before and after Python's life.
    pub(super) fn with_gil<T>(&self, may_take: bool, act: impl FnOnce() -> T) -> Option<T> {
        // SAFETY: none of these needs the GIL, nor an interpreter that lives.
        let (own, held) = unsafe {
            if (self.is_initialized)() == 0 || (self.is_finalizing)() != 0 {
                return None;
            }
            let own = (self.own_state)();
            (own, !own.is_null() && (self.current_state)() == own)
        };
        let may = held || may_take && self.is_alone();
        if own.is_null() || !may {
            return None;
        }
        if held {
            return Some(act());
        }
        // SAFETY: Python knows this thread, which does not hold the GIL: with one interpreter it could hold no other state's. It
        // does not end before `frames::stop` has seen this thread leave.
        let state = unsafe { (self.ensure)() };
        let result = act();
        // SAFETY: the pair of the above.
        unsafe { (self.release)(state) };
        Some(result)
    }

    /// Whether there is one interpreter only.
    fn is_alone(&self) -> bool {
        // SAFETY: a look at the list's head, which lives as long as Python; others are only told to be there.
        unsafe {
            let first = (self.first_interpreter)();
            !first.is_null() && (self.next_interpreter)(first).is_null()
        }
    }

    /// This thread's innermost frames. With the GIL.
    pub(super) fn walk(&self, into: &mut [Key]) -> usize {
        let mut count = 0;
        // SAFETY: the GIL is held. The first frame is borrowed, all others are new references, which are dropped. The code of
        // a frame of this thread's stack lives at least as long as the GIL is held.
        unsafe {
            let mut frame = (self.frame)();
            let mut owned = false;
            for key in into {
                if frame.is_null() {
                    break;
                }
                let code = (self.code)(frame);
                let at = self.last_instruction.map_or_else(|| (self.line)(frame), |last| last(frame));
                *key = Key { code: code as usize, at };
                (self.drop)(code);
                count += 1;
                let back = (self.back)(frame);
                if owned {
                    (self.drop)(frame);
                }
                (frame, owned) = (back, true);
            }
            if owned && !frame.is_null() {
                (self.drop)(frame);
            }
        }
        count
    }

    /// Keeps the code of a frame of this thread's stack for ever, so that its address is no other's, and reads its file and name.
    /// With the GIL.
    pub(super) fn keep(&self, key: Key) -> Code {
        let code = key.code as Object;
        let (mut kind, mut value, mut trace) = (null_mut(), null_mut(), null_mut());
        // SAFETY: the GIL is held, and the code lives: it is that of a frame on this thread's stack. An error that was set
        // stays set; one of ours goes.
        unsafe {
            (self.fetch)(&mut kind, &mut value, &mut trace);
            (self.take)(code);
            let text = |name: &CStr| self.text_of((self.attribute)(code, name.as_ptr()));
            let found = Code { file: text(c"co_filename"), name: text(c"co_name") };
            (self.restore)(kind, value, trace);
            found
        }
    }

    /// The line of a key. With the GIL; the code is kept.
    pub(super) fn line(&self, key: Key) -> i32 {
        if self.last_instruction.is_none() {
            return key.at;
        }
        // SAFETY: the GIL is held, and the code lives.
        unsafe { (self.line_of)(key.code as Object, key.at) }
    }

    /// # Safety
    /// The GIL is held; `object` is null or a new reference, which is dropped.
    unsafe fn text_of(&self, object: Object) -> String {
        if object.is_null() {
            return "?".to_owned();
        }
        let mut bytes = 0;
        // SAFETY: by this function's contract; the text lives as long as the object.
        unsafe {
            let text = (self.text)(object, &mut bytes);
            let found = match usize::try_from(bytes) {
                Ok(bytes) if !text.is_null() => String::from_utf8_lossy(std::slice::from_raw_parts(text.cast(), bytes)).into_owned(),
                _ => "?".to_owned(),
            };
            (self.drop)(object);
            found
        }
    }
}

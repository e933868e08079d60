// The parts of CodeMirror (MIT) and jsdiff (BSD-3-Clause) that static/compare.js takes; see package.json.
export { EditorView, keymap, lineNumbers } from "@codemirror/view";
export { EditorState } from "@codemirror/state";
export { Change, MergeView, diff, goToNextChunk, goToPreviousChunk, unifiedMergeView } from "@codemirror/merge";
export { search, searchKeymap } from "@codemirror/search";
export { HighlightStyle, StreamLanguage, syntaxHighlighting } from "@codemirror/language";
export { tags } from "@lezer/highlight";
export { cpp } from "@codemirror/legacy-modes/mode/clike";
export { python } from "@codemirror/legacy-modes/mode/python";
export { gas } from "@codemirror/legacy-modes/mode/gas";
export { diffArrays } from "diff";

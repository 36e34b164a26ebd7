//! Colours and type of the pictures, for light and dark.

/// Clients' colours, by slot.
pub(super) const CLIENTS: [&str; 8] = ["#2f77d0", "#e07b1a", "#1f9d78", "#c2417c", "#7e5bd0", "#0d95b5", "#b8901a", "#8c5a3c"];

pub(super) const SVG: &str = "\
text{font:13px system-ui,'DejaVu Sans',sans-serif;fill:#1c2127}\
.bg{fill:#fff}.name{font-weight:600;font-size:15px}.small{font-size:11.5px;fill:#5b6570}.end{text-anchor:end}.mid{text-anchor:middle}\
.free{fill:#e3e7eb}.beyond{fill:#f6f7f9}.outside{fill:#9aa3ad}.retired{fill:#c9a227}.orphaned{fill:#a33a3a}\
.edge{stroke:#fff;stroke-width:1}.line{stroke:#c6ccd2;stroke-width:1;fill:none}.limit{stroke:#1c2127;stroke-width:1.5;stroke-dasharray:4 3}\
.slack{opacity:.38}\
@media(prefers-color-scheme:dark){text{fill:#e4e8ec}.bg{fill:#14181c}.small{fill:#9da7b1}.free{fill:#2b323a}.beyond{fill:#1b2025}.outside{fill:#5f6973}\
.edge{stroke:#14181c}.line{stroke:#3b444d}.limit{stroke:#e4e8ec}}";

pub(super) const PAGE: &str = "\
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,'DejaVu Sans',sans-serif;margin:2rem auto;max-width:1140px;padding:0 1rem;\
color:#1c2127;background:#fff}h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:1.6rem 0 .4rem}.note{color:#5b6570;font-weight:400;\
font-size:.85rem}.sheet svg{max-width:100%;height:auto}.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;\
font-variant-numeric:tabular-nums;white-space:nowrap}th{font-weight:600}th,td{text-align:right;padding:.25rem .48rem;border-bottom:1px solid #dfe3e7}\
th:first-child,td:first-child,.t{text-align:left}th:first-child,td:first-child{padding-left:0}\
@media(prefers-color-scheme:dark){body{color:#e4e8ec;background:#14181c}.note{color:#9da7b1}th,td{border-color:#303840}}";

pub(super) fn of_client(slot: u32) -> &'static str {
    CLIENTS.get(slot as usize % CLIENTS.len()).copied().unwrap_or("#777")
}

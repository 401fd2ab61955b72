// A transformer's configuration as text. `weft train --config`, C programs
// (weft_transformer_create_from_text) and other programs can read the same text. Any thread.
#pragma once

#include <string>
#include <string_view>

#include "weft/models/transformer.hpp"

namespace weft {

/// Reads the table [model] of a TOML text, whose keys are the members of TransformerConfig:
///
///     [model]
///     dim = 128
///     heads = 4
///     tied = true
///
/// Members that the table does not name are as in `initial`. If the text names heads but not kv_heads, or
/// `initial` has kv_heads 0, kv_heads becomes heads. If the text names dim but not ffn_hidden, or `initial`
/// has ffn_hidden 0, ffn_hidden becomes usual_ffn_hidden(dim). The rest of the text is ignored: it may be a
/// whole file for `weft train --config`.
///
/// Throws bad_argument naming `source` and the line: `run.toml:2: not TOML: …`,
/// `run.toml: has no table [model]`, `run.toml:3: [model] has no "head"; is heads meant?`,
/// `run.toml:3: heads is "4"; expected an integer`, `run.toml:2: heads is 0; expected 1 or more`; and the
/// errors of TransformerConfig::check(), with the line of the first key that the error names.
TransformerConfig transformer_from_text(std::string_view text, std::string_view source = "text",
                                        const TransformerConfig& initial = {});

/// Returns `config` as a TOML table [model] with every key, ended by a line feed. transformer_from_text()
/// reads it back to the same config.
std::string transformer_text(const TransformerConfig& config);

}  // namespace weft

"""Chat templates in the manner of well-known models, for a tokenizer with their control tokens."""

# ruff: noqa: E501, RUF001 - the templates have long lines, and the signs of their models

from dataclasses import dataclass
from typing import Any

from byte_pairs import MERGES, byte_pairs
from transformers import AddedToken

_CHATML = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_ASKED = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
_CALLS = """
{%- for c in m.tool_calls -%}
{{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' -}}
{{- (c.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}"""
_RESULT = (
    "{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"
)

CHATML = f"{{%- for m in messages -%}}{_CHATML}{{%- endfor -%}}{_ASKED}"

QWEN25 = f"""
{{%- if tools -%}}
{{{{ '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'You help.') }}}}
{{{{- '\\n\\n# Tools\\n<tools>' -}}}}
{{%- for t in tools -%}}{{{{- '\\n' + (t | tojson) -}}}}{{%- endfor -%}}{{{{- '\\n</tools><|im_end|>\\n' -}}}}
{{%- elif messages[0].role == 'system' -%}}
{{{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}}}
{{%- else -%}}{{{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' -}}}}
{{%- endif -%}}
{{%- for m in messages -%}}
{{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) -%}}
{_CHATML}
{{%- elif m.role == 'assistant' -%}}
{{{{- '<|im_start|>assistant' + ('\\n' + m.content if m.content else '') -}}}}{_CALLS}{{{{- '<|im_end|>\\n' -}}}}
{{%- elif m.role == 'tool' -%}}{_RESULT}
{{%- endif -%}}
{{%- endfor -%}}{_ASKED}"""

QWEN3 = f"""
{{%- set ns = namespace(last=messages | length - 1) -%}}
{{%- for m in messages -%}}{{%- if m.role == 'user' -%}}{{%- set ns.last = loop.index0 -%}}{{%- endif -%}}{{%- endfor -%}}
{{%- if tools -%}}
{{{{- '<|im_start|>system\\n' -}}}}
{{%- if messages[0].role == 'system' -%}}{{{{- messages[0].content + '\\n\\n' -}}}}{{%- endif -%}}
{{{{- '# Tools\\n<tools>' -}}}}{{%- for t in tools -%}}{{{{- '\\n' + (t | tojson) -}}}}{{%- endfor -%}}{{{{- '\\n</tools><|im_end|>\\n' -}}}}
{{%- elif messages[0].role == 'system' -%}}{{{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}}}
{{%- endif -%}}
{{%- for m in messages -%}}
{{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}}{_CHATML}
{{%- elif m.role == 'assistant' -%}}
{{%- set thought = m.reasoning_content if m.reasoning_content is string else '' -%}}
{{{{- '<|im_start|>assistant\\n' -}}}}
{{%- if loop.index0 > ns.last and (loop.last or thought) -%}}
{{{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + m.content.lstrip('\\n') -}}}}
{{%- else -%}}{{{{- m.content -}}}}{{%- endif -%}}
{{%- if m.tool_calls -%}}{_CALLS}{{%- endif -%}}{{{{- '<|im_end|>\\n' -}}}}
{{%- elif m.role == 'tool' -%}}{_RESULT}
{{%- endif -%}}
{{%- endfor -%}}{_ASKED}"""

LLAMA31 = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content | trim -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set rest = messages -%}{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' -}}
{%- if tools is defined and tools is not none -%}{{- 'Environment: ipython\\n' -}}{%- for t in tools -%}{{- (t | tojson) + '\\n' -}}{%- endfor -%}{%- endif -%}
{{- 'Today is a day.\\n\\n' + system + '<|eot_id|>' -}}
{%- for m in rest -%}
{%- if m.role == 'tool' or m.role == 'ipython' -%}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' -}}
{%- elif 'tool_calls' in m -%}
{%- if m.tool_calls | length != 1 -%}{{ raise_exception('This model only supports single tool-calls at once!') }}{%- endif -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' + (m.tool_calls[0].function.arguments | tojson) + '}<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""

GEMMA = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{%- set first = messages[0].content + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (first if loop.first else '') + (m.content | trim) + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""

DEEPSEEK3 = """
{%- set ns = namespace(system='') -%}
{%- for m in messages -%}{%- if m.role == 'system' -%}{%- set ns.system = ns.system + ('\\n\\n' if ns.system else '') + m.content -%}{%- endif -%}{%- endfor -%}
{{- bos_token + ns.system -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<｜User｜>' + m.content -}}
{%- elif m.role == 'assistant' and m['tool_calls'] is defined and m['tool_calls'] is not none -%}
{{- '<｜Assistant｜>' + (m.content or '') + '<｜tool▁calls▁begin｜>' -}}
{%- for c in m['tool_calls'] -%}{{- c['function']['name'] + '<｜tool▁sep｜>' + c['function']['arguments'] + '<｜tool▁call▁end｜>' -}}{%- endfor -%}
{{- '<｜tool▁calls▁end｜>' + eos_token -}}
{%- elif m.role == 'assistant' -%}{{- '<｜Assistant｜>' + m.content + eos_token -}}
{%- elif m.role == 'tool' -%}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜>' -}}{%- endif -%}"""

SMOLLM3 = """
{%- set custom = messages[0].content if messages[0].role == 'system' else '' -%}
{{- '<|im_start|>system\\n## Metadata\\n\\n' + custom -}}
{%- if tools -%}{{- '\\n### Tools\\n' -}}{%- for t in tools -%}{{- (t | tojson) + '\\n' -}}{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' -%}
{% generation %}
{{- '<|im_start|>assistant\\n' + m.content.lstrip('\\n') -}}
{%- if m.tool_calls -%}{{- m.tool_calls[0].function.name + (m.tool_calls[0].function.arguments | tojson) -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{% endgeneration %}
{%- elif m.role == 'tool' -%}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

MISTRAL = """
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- set last = (rest | selectattr('role', 'equalto', 'user') | list)[-1] -%}
{{- bos_token -}}
{%- for m in rest -%}
{%- if m.role == 'user' -%}
{%- if tools and m == last -%}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{{- '[INST] ' + (system if loop.first else '') + m.content + '[/INST]' -}}
{%- elif m.tool_calls is defined and m.tool_calls is not none -%}
{{- '[TOOL_CALLS] [' -}}{%- for c in m.tool_calls -%}{{- '{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}' -}}{%- endfor -%}{{- ']' + eos_token -}}
{%- elif m.role == 'assistant' -%}{{- ' ' + m.content + eos_token -}}
{%- elif m.role == 'tool' -%}{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' -}}
{%- else -%}{{ raise_exception('Only user and assistant roles are supported!') }}
{%- endif -%}
{%- endfor -%}"""


@dataclass(frozen=True)
class Style:
    """A template, and what it knows.

    Args:
        template: Jinja.
        tools: Whether tools, calls and results are written.
        both: Whether a message with a call may have content, too.
        reasoning: Whether the reasoning of an answer is written.
        greeting: Whether an assistant may begin.
    """

    template: str
    tools: bool = True
    both: bool = True
    reasoning: bool = False
    greeting: bool = True


STYLES = {
    "chatml": Style(CHATML, tools=False),
    "qwen2.5": Style(QWEN25),
    "qwen3": Style(QWEN3, reasoning=True),
    "llama3.1": Style(LLAMA31, both=False),
    "gemma": Style(GEMMA, tools=False, greeting=False),
    "deepseek-v3": Style(DEEPSEEK3),
    "smollm3": Style(SMOLLM3),
    "mistral": Style(MISTRAL, both=False),
}

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<s>"),
)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<｜User｜>", "<｜Assistant｜>")


def tokenizer_of(style: str) -> Any:
    """Return a tokenizer of bytes with all of these control tokens, and the template."""
    # "\n\n" is one token where nothing follows, as at the end of a prompt
    tokenizer = byte_pairs([*MERGES, ("Ċ", "Ċ"), ("Ġ", "b")])
    tokenizer.add_special_tokens({"extra_special_tokens": list(SPECIAL), "bos_token": "<s>"})
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ADDED])
    tokenizer.chat_template = STYLES[style].template
    return tokenizer
